"""The examples of docs/privacy.md print what they say."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dp_accounting", reason="needs the privacy extra")

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"


def test_the_worked_example_prints_what_the_page_shows() -> None:
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(examples) == 2
    for code, shown in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown


def test_every_figure_of_the_page_is_there() -> None:
    figures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text())
    assert figures
    assert all((PAGE.parent / figure).stat().st_size > 10_000 for figure in figures)


def test_every_option_is_on_the_page() -> None:
    from dataclasses import fields

    from fedkeep.privacy.options import PrivacyOptions

    missing = [
        field.name for field in fields(PrivacyOptions) if f"`{field.name}" not in PAGE.read_text()
    ]
    assert missing == []
