"""`fedkeep report`: the same figures in the terminal, as Markdown and as one HTML file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedkeep.cli.app import app
from fedkeep.core.errors import DataError
from fedkeep.records import compare, read_runs
from fedkeep.records.tables import markdown, tables
from fedkeep.web.report import html


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, fleet: dict[str, Any]) -> Path:
    found = tmp_path_factory.mktemp("fleet")
    fleet["write_fleet"](found, seeds=2, rounds=60)
    return found


def test_the_terminal_shows_every_method_with_random_beside_ode(directory: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(directory)])
    assert result.exit_code == 0
    lines = [line for line in result.output.splitlines() if "% ±" in line and "│" in line]
    methods = [re.split(r"[│|]", line)[1].strip() for line in lines]
    assert methods == ["fifo", "reservoir", "ode", "full-data", "high-loss"]
    assert all("±" in line for line in lines)
    assert re.search(
        r"ode is (better than|worse than|equivalent to|against) ", " ".join(result.output.split())
    )


def test_files_are_written_where_asked(directory: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "report.html", tmp_path / "report.md"
    result = CliRunner().invoke(
        app, ["report", str(directory), "--html", str(page), "--markdown", str(text)]
    )
    assert result.exit_code == 0
    assert text.read_text().startswith("### fashion-mnist\n\n| method |")
    assert page.read_text().startswith("<!doctype html>")


def test_another_base_may_be_asked_for(directory: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = CliRunner().invoke(
        app, ["report", str(directory), "--against", "high-loss", "--html", str(page)]
    )
    assert '"bases":["high-loss",' in page.read_text()
    assert "against high-loss" in result.output
    assert "against fifo" not in result.output


def test_a_wrong_directory_or_file_is_reported(directory: Path, tmp_path: Path) -> None:
    for arguments, words in [
        ([str(tmp_path)], "no runs in"),
        ([str(tmp_path / "no")], "is not a directory"),
        ([str(directory), "--html", str(tmp_path / "no" / "page.html")], "cannot write"),
    ]:
        result = CliRunner().invoke(app, ["report", *arguments])
        assert isinstance(result.exception, DataError)
        assert words in str(result.exception)


def test_words_from_a_record_cannot_break_a_markdown_table(
    tmp_path: Path, fleet: dict[str, Any]
) -> None:
    fleet["FakeRun"](tmp_path / "a.jsonl", method="a|b\n<img>`x`").advance(10)
    text = markdown(compare(read_runs(tmp_path)))
    assert "| a\\|b &lt;img>\\`x\\` |" in text


def test_a_table_tells_settings_apart(tmp_path: Path, fleet: dict[str, Any]) -> None:
    for capacity in (5, 10):
        fleet["FakeRun"](tmp_path / f"{capacity}.jsonl", setting=f"capacity={capacity}").advance(10)
    titles = [table.title for table in tables(compare(read_runs(tmp_path)))]
    assert titles == ["fashion-mnist, capacity=10", "fashion-mnist, capacity=5"]


def test_the_html_report_stands_alone_and_holds_the_runs(directory: Path) -> None:
    runs = read_runs(directory)
    page = html(runs, compare(runs), "my runs")
    assert not re.search(r'(src|href)="(?!#)', page)
    found = re.search(
        r'<script type="application/json" id="snapshot">(.*?)</script>', page, re.DOTALL
    )
    assert found is not None
    data = json.loads(found[1])
    assert len(data["update"]["views"]) == len(runs)
    assert data["update"]["comparison"]["rows"][0]["method"] == "fifo"
    assert all(devices for devices in data["devices"].values())


def test_a_record_cannot_end_the_script_it_is_in(tmp_path: Path, fleet: dict[str, Any]) -> None:
    evil = "</script><script>alert(1)</script>"
    fleet["FakeRun"](tmp_path / "a.jsonl", name=evil, labels=(evil, "b"), task=evil).advance(10)
    runs = read_runs(tmp_path)
    page = html(runs, compare(runs), evil)
    assert evil not in page
    assert page.count("<script") == 2
