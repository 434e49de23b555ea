"""The table of `make coverage` counts lines and branches, and has a place on its page."""

from tests.coverage_table import MARKED, PAGE, table, written


def file(run: int, there: int) -> dict[str, dict[str, int]]:
    """What coverage says of a file; half of it are branches."""
    return {
        "summary": {
            "covered_lines": run,
            "covered_branches": run,
            "num_statements": there,
            "num_branches": there,
        }
    }


def test_packages_are_summed_and_the_whole_comes_first() -> None:
    found = table(
        {
            "src/fedkeep/core/a.py": file(10, 10),
            "/home/of/fedkeep/src/fedkeep/core/gist/b.py": file(5, 10),
            "src/fedkeep/api.py": file(0, 20),
        }
    )
    assert found.splitlines()[2:] == [
        "| all | 37.5 | 80 |",
        "| core | 75.0 | 40 |",
        "| modules of its own | 0.0 | 40 |",
    ]


def test_the_page_has_a_place_for_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(MARKED.findall(page)) == 1
    assert "| all | 1.0 | 2 |" in written(page, "| all | 1.0 | 2 |")
    assert written(page, "x").partition("<!-- coverage")[0] == page.partition("<!-- coverage")[0]
