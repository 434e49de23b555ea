"""The page of public names has them all, and every page of packages names what there is."""

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import fedkeep

DOCS = Path(__file__).parents[2] / "docs"
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "generate_api.py"))
NAMED = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def test_every_public_name_is_on_the_page_once() -> None:
    shown = [name for names in GENERATOR["GROUPS"].values() for name in names]
    assert sorted(shown) == sorted(fedkeep.__all__)


def test_the_page_is_up_to_date() -> None:
    written = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    assert written == GENERATOR["page"](), "write it again with `python docs/generate_api.py`"


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_what_a_page_shows_exists_and_has_a_docstring(page: Path) -> None:
    for path in NAMED.findall(page.read_text(encoding="utf-8")):
        try:
            thing = importlib.import_module(path)
        except ModuleNotFoundError:
            module, _, name = path.rpartition(".")
            thing = getattr(importlib.import_module(module), name)
        assert thing.__doc__, path
