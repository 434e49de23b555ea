"""The examples in docstrings say what happens."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
EXAMPLE = re.compile(r"^ *(?:>>>|\.\.\.) (.*)$", re.MULTILINE)
IMPORT = re.compile(r"^ *from (fedkeep[\w.]*) import (\([^)]*\)|[^\n]+)", re.MULTILINE)
WORD = re.compile(r"\b[A-Za-z_]\w*")
WITH_EXAMPLES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_of_a_module(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_what_documents_tell_users_to_import_is_shown_at_work() -> None:
    """Every class and function that README, pages and examples import has a worked example."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    shown = {
        word
        for path in SOURCE.rglob("*.py")
        for line in EXAMPLE.findall(path.read_text())
        for word in WORD.findall(line)
    }
    missing = set()
    for module, names in (
        found for page in pages for found in IMPORT.findall(page.read_text(encoding="utf-8"))
    ):
        for name in WORD.findall(re.sub(r" as \w+", "", names)):
            thing = getattr(importlib.import_module(module), name)
            called = inspect.isroutine(thing) or (
                inspect.isclass(thing) and not issubclass(thing, Exception)
            )
            missing |= {f"{module}.{name}"} if called and name not in shown else set()
    assert missing == set()
