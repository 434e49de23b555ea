"""Writes the coverage of each package into CONTRIBUTING.md, from what `make coverage` measured.

python -m tests.coverage_table
"""

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coverage

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
MARKED = re.compile(
    r"(<!-- coverage: written by make coverage -->\n).*?(<!-- end of coverage -->)", re.DOTALL
)


def table(files: Mapping[str, Any]) -> str:
    """The share of lines and branches that tests run, in all and by package, as Markdown.

    Parameters
    ----------
    files : mapping
        By path, what `coverage json` says of a file.
    """
    counts: dict[str, list[int]] = {"all": [0, 0]}
    for path, found in files.items():
        inside = path.rpartition("fedkeep/")[2]
        package = inside.partition("/")[0] if "/" in inside else "modules of its own"
        summary = found["summary"]
        run = summary["covered_lines"] + summary["covered_branches"]
        there = summary["num_statements"] + summary["num_branches"]
        for name in ("all", package):
            count = counts.setdefault(name, [0, 0])
            count[0] += run
            count[1] += there
    rows = [
        f"| {name} | {100 * run / max(there, 1):.1f} | {there:,} |"
        for name, (run, there) in sorted(counts.items(), key=lambda item: (item[0] != "all", item))
    ]
    return "\n".join(["| package | covered, % | lines and branches |", "|---|---:|---:|", *rows])


def written(page: str, body: str) -> str:
    """The page with the table in its place."""
    return MARKED.sub(lambda found: f"{found[1]}\n{body}\n\n{found[2]}", page)


def main() -> None:
    measured = coverage.Coverage()
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        measured.json_report(outfile=str(report))
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table(files)), encoding="utf-8")


if __name__ == "__main__":
    main()
