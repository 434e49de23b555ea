"""README and pages: links lead somewhere, and tables are those of the results and the demo."""

import re
from pathlib import Path

import pytest
from lab.readme import MARKED, TABLES, with_tables

from fedkeep.records import compare, read_runs
from tests.docs.snippets import blocks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
DEMO = ROOT / "runs" / "demo"
PAGES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("[A-Z]*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_picture_is_small_and_shows_every_method() -> None:
    picture = ROOT / "docs" / "figures" / "demo.svg"
    drawn = picture.read_text(encoding="utf-8")
    assert picture.stat().st_size < 200_000
    assert [method for method in table_of_readme() if f">{method}</text>" not in drawn] == []


@pytest.mark.skipif(
    not (DEMO / "report.html").exists(), reason="runs/demo is not there: `make demo` first"
)
def test_the_demo_prints_what_the_readme_says() -> None:
    rows = {row.method: 100 * row.measures["final"].mean for row in compare(read_runs(DEMO)).rows}
    assert table_of_readme() == pytest.approx(rows, abs=0.5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    experiments = ROOT / "experiments"
    assert text == with_tables(text, experiments, experiments / "results"), (
        "write it again with `python experiments/reproduce.py report`"
    )


def test_every_table_is_on_a_page_and_the_readme_has_five() -> None:
    shown = {found[1] for page in PAGES for found in MARKED.findall(page.read_text("utf-8"))}
    assert shown == set(TABLES)
    expected = ["results-short", "costs", "bytes-verdict"]
    expected += ["paper-table2", "paper-came-back"]
    assert [found[1] for found in MARKED.findall(README)] == expected


def test_the_readme_has_code_for_each_of_its_readers() -> None:
    languages = [block.language for block in blocks(README)]
    assert languages == ["sh", "text", "python", "toml", "sh", "python", "toml", "sh"]
    assert README.count("┏") == 1


def test_a_stale_number_is_found() -> None:
    experiments = ROOT / "experiments"
    changed = README.replace("| WiFi floors | 89", "| WiFi floors | 99")
    assert changed != README
    assert with_tables(changed, experiments, experiments / "results") == README


def table_of_readme() -> dict[str, float]:
    """Per method the final accuracy in the demo's table, in percent."""
    table = README.partition("<!-- demo -->")[2].partition("```\n")[0]
    return {
        method: float(accuracy)
        for method, accuracy in re.findall(r"│ ([\w-]+) +│ +\d+ │ ([\d.]+) %", table)
    }
