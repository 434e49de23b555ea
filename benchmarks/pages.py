"""Tables that benchmarks put into the pages of docs/."""

from pathlib import Path


def write_between(path: Path, name: str, table: str) -> None:
    """Put a table between the marks of this name in a page."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, mark, rest = path.read_text().partition(begin)
    _, closing, after = rest.partition(end)
    if not (mark and closing):
        raise SystemExit(f"{path} has no lines {begin} and {end} to put the table between")
    path.write_text(f"{before}{begin}\n{table.rstrip()}\n{end}{after}")
