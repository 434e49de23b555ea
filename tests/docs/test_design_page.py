"""docs/design.md against the code: its links, its map, its five calls, its exception tree."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import fedkeep.testing
from fedkeep.core.errors import FedkeepError

assert fedkeep.testing
CORE = "fedkeep.core.errors"
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./((?:src|experiments)/[\w/]+\.py)\)")


def names_in(path: Path) -> set[str]:
    """Functions and classes of a file, and `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name} | {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef)
            }
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def test_what_the_page_links_to_is_there() -> None:
    links = LINK.findall(PAGE)
    assert len(links) > 20
    missing = [
        f"{name} in {path}"
        for name, path in links
        if name not in names_in(ROOT / path) and not path.endswith(f"{name.replace('.', '/')}.py")
    ]
    assert missing == []


def test_the_map_names_every_package() -> None:
    drawn = PAGE.split("## Map", 1)[1].split("```")[1]
    packages = [path.parent.name for path in (ROOT / "src" / "fedkeep").glob("*/__init__.py")]
    assert [name for name in packages if not re.search(rf"\b{name}/", drawn)] == []


def test_a_public_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "experiments" / "lab").rglob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


CALLERS = {
    "simulator": ["sim/fleet.py", "sim/engine.py"],
    "agent and serve": ["agent/agent.py", "flower/strategy.py"],
}
CALLS = [".ingest(", ".open_round(", "Participation(", ".finish(", ".receive(", ".close_round("]


@pytest.mark.parametrize("callers", CALLERS.values(), ids=CALLERS)
@pytest.mark.parametrize("call", CALLS)
def test_who_carries_a_sample_makes_the_five_calls(callers: list[str], call: str) -> None:
    texts = [(ROOT / "src" / "fedkeep" / path).read_text(encoding="utf-8") for path in callers]
    assert sum(call in text for text in texts) == 1
    assert all(f"../src/fedkeep/{path})" in PAGE for path in callers)


def test_keeper_makes_the_calls_of_a_device_and_its_strategy_uses_the_pipeline() -> None:
    folder = ROOT / "src" / "fedkeep" / "flower"
    keeper = (folder / "keeper.py").read_text(encoding="utf-8")
    assert [
        call for call in (".observe(", "Participation(", ".finish(") if call not in keeper
    ] == []
    assert "_pipeline.merge(" in (folder / "keeper_strategy.py").read_text(encoding="utf-8")


def test_the_exception_tree_is_that_of_the_code() -> None:
    tree = PAGE.split("## Exceptions", 1)[1].split("```")[1]
    drawn = set(re.findall(r"- (\w+)", tree))
    public = {cls.__name__ for cls in FedkeepError.__subclasses__() if cls.__module__ == CORE}
    assert drawn == public | {"FedkeepError", "ConformanceError"}
