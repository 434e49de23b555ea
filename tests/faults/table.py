"""A page of fault tests in long form: each row is measured, printed and written with its target."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Row = tuple[str, str, str, bool]
"""What, target, found, met."""
Measure = Callable[[float], Row]
"""A row at a scale: 1 is the long form."""


def write_page(out: Path, title: str, about: str, rows: Sequence[tuple[str, Measure]]) -> None:
    """Measures the rows of the command line, writes the page; exits 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--quick",
        dest="scale",
        action="store_const",
        const=0.05,
        help="a twentieth of everything, to see that it runs",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="a share of everything, to 1")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="ROW",
        choices=[name for name, _ in rows],
        help="these rows; those that the page has of the others stay",
    )
    options = parser.parse_args()
    lines = dict.fromkeys((name for name, _ in rows), "")
    lines.update(_written(options.out, list(lines)) if options.only else {})
    missed = False
    for name, measure in rows:
        if options.only and name not in options.only:
            continue
        start = time.monotonic()
        what, target, found, met = measure(options.scale)
        missed = missed or not met
        print(f"{what:60} {found}  [{time.monotonic() - start:.0f} s]", flush=True)
        verdict = "met" if met else "**missed**"
        lines[name] = f"| {what} | {target} | {found} | {verdict} | <!-- {name} -->"
        options.out.write_text(
            "\n".join([*_head(title, about), *filter(None, lines.values())]) + "\n", "utf-8"
        )
    raise SystemExit(1 if missed else 0)


def _head(title: str, about: str) -> list[str]:
    return [f"# {title}", "", about, "", "| what | target | found | |", "|---|---|---|---|"]


def _written(path: Path, names: list[str]) -> dict[str, str]:
    """The rows of earlier runs, so that a page can be made in pieces; each names its function."""
    if not path.exists():
        return {}
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = {line.rpartition("<!-- ")[2].removesuffix(" -->"): line for line in rows}
    return {name: named[name] for name in names if name in named}
