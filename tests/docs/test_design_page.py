"""docs/design.md against the code: what it links to is there, its map names every room, a class name is used once."""

import ast
import re
from collections import defaultdict
from pathlib import Path

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


def test_the_map_names_every_room() -> None:
    drawn = PAGE.split("## Map", 1)[1].split("```")[1]
    rooms = [path.parent.name for path in (ROOT / "src" / "fedkeep").glob("*/__init__.py")]
    assert [room for room in rooms if not re.search(rf"\b{room}/", drawn)] == []


def test_a_public_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "experiments" / "lab").rglob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
