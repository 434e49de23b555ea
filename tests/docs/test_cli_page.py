"""The command line's page is what the commands print, and every verb is explained elsewhere too."""

import runpy
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

from fedkeep.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "generate_cli.py"))
VERBS: list[click.Context] = list(
    GENERATOR["verbs"](click.Context(get_command(app), info_name="fedkeep"))
)


def test_the_page_is_up_to_date() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert page == GENERATOR["page"](), "write it again with `python docs/generate_cli.py`"


@pytest.mark.parametrize("verb", [context.command_path for context in VERBS])
def test_every_verb_is_told_of_in_a_page_written_by_hand(verb: str) -> None:
    pages = [page for page in (ROOT / "README.md", *DOCS.glob("*.md")) if page.name != "cli.md"]
    assert any(verb in page.read_text(encoding="utf-8") for page in pages)


def test_every_verb_and_option_says_what_it_is_for() -> None:
    silent = []
    for context in VERBS:
        records = [parameter.get_help_record(context) for parameter in context.command.params]
        silent += [
            f"{context.command_path} {r[0]}"
            for r in records
            if r and (not r[1] or r[1].startswith("["))
        ]
        if not context.command.help:
            silent.append(context.command_path)
    assert silent == []
