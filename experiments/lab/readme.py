"""The README's table of results, from the summaries in experiments/results; a test fails when it is stale."""

from __future__ import annotations

import re
from pathlib import Path

from lab.results import Results

BLOCK = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", re.DOTALL)
COLUMNS = {
    "FIFO": ("fifo",),
    "random": ("reservoir",),
    "ODE as in the paper": ("ode-paper", "ode-est"),
    "ODE, our default": ("ode-default",),
    "unlimited storage": ("full-data",),
}
TASKS = {
    "embedded": "the demo's",
    "st": "synthetic (ST)",
    "st-converging": "synthetic, converging",
    "st-all-labels": "synthetic, all labels everywhere",
    "ic": "Fashion-MNIST (IC)",
    "har": "activities (HAR)",
    "har-converging": "activities, converging",
    "tc": "traffic (TC)",
}
NOTE = r"""\* at a reduced scale: fewer rounds, devices or seeds than the paper's; [RESULTS](experiments/RESULTS.md)
says how. (TC has a fifth of the paper's rounds at five times its learning rate.) Where two intervals overlap, nothing
is decided.
"""


def table(directory: Path) -> str:
    """One row a task, from the experiment that compares most; empty where nothing has run."""
    results = Results(directory)
    rows = [_row(title, name, results) for task, title in TASKS.items() if (name := _experiment(task, results))]
    if not rows:
        return "\nNo full run is committed yet: `make reproduce` makes them.\n\n"
    head = f"| task | {' | '.join(COLUMNS)} | seeds |\n|---|{'---:|' * (len(COLUMNS) + 1)}\n"
    return f"\n{head}{''.join(rows)}\n{NOTE}\n"


def _experiment(task: str, results: Results) -> str | None:
    names = (f"default/{task}", f"table2/{task}")
    return next((name for name in names if results.has(name)), None)


def _row(title: str, name: str, results: Results) -> str:
    cells = [_cell(name, methods, results) for methods in COLUMNS.values()]
    seeds = len({curve.seed for curve in results.summaries[name].curves})
    reduced = "\\*" if results.summaries[name].changed else ""
    return f"| {title}{reduced} | {' | '.join(cells)} | {seeds} |\n"


def _cell(name: str, methods: tuple[str, ...], results: Results) -> str:
    shown = next((shown for method in methods if (shown := results.shown(name, method))), None)
    if shown is None:
        return "not run"
    return f"{shown.mean:.1f}" + ("" if shown.half_width is None else f" ± {shown.half_width:.1f}")


def write_table(readme: Path, results: Path) -> None:
    """Puts the table into its place in the README, where there is one."""
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        readme.write_text(BLOCK.sub(lambda _: table(results), text), encoding="utf-8")
