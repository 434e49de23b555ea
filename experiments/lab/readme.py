"""The README's table of results, from results/arena.json; a test fails when it is stale."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.findings import in_words

BLOCK = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", re.DOTALL)
COLUMNS = {
    "FIFO": "fifo",
    "class-balanced FIFO": "class-balanced-fifo",
    "ODE as in the paper": "ode-est",
    "**gist, local**": "gist-local",
    "**gist, shared**": "gist-shared",
    "unlimited storage": "full-data",
}
TASKS = {
    "uji-indoor-ordered": "WiFi floors, in time order",
    "westermo-ordered": "industrial network, in time order",
    "har-ordered": "activities, in time order",
    "embedded-bursts": "the demo's, labels in bursts",
    "embedded": "the demo's",
    "st-all-labels": "synthetic, all labels everywhere",
    "st-converging": "synthetic, few labels a device",
    "har-converging": "activities",
    "ic": "Fashion-MNIST",
    "tc": "traffic, generated",
    "tc-real": "traffic, real",
    "audio-mnist": "spoken digits",
    "audio-mnist-5": "spoken digits, five slots",
}
NOTE = """Accuracy in percent at the task's learning rate, ± half of the 95 % interval; 100 to 300 rounds. Each
method at its own best rate, paired differences, worst devices and rarest labels: [RESULTS](experiments/RESULTS.md).
Where the interval of a difference holds 0, nothing is decided.
"""


def table(results: Path) -> str:
    """One row a task; a line that says so where nothing has run."""
    path = results / "arena.json"
    arena: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = [_row(title, arena[task]) for task, title in TASKS.items() if task in arena]
    if not rows:
        return "\nNo full run is committed yet: `make reproduce` makes them.\n\n"
    head = f"| task | {' | '.join(COLUMNS)} | seeds |\n|---|{'---:|' * (len(COLUMNS) + 1)}\n"
    return f"\n{head}{''.join(rows)}\n{NOTE}\n"


def _row(title: str, methods: Mapping[str, Any]) -> str:
    cells = [in_words(methods.get(method, {}).get("shared_rate")) for method in COLUMNS.values()]
    seeds = sorted({row["seeds"] for method, row in methods.items() if method in COLUMNS.values()})
    return f"| {title} | {' | '.join(cells)} | {'-'.join(map(str, (seeds[0], seeds[-1])[: len(seeds)]))} |\n"


def write_table(readme: Path, results: Path) -> None:
    """Puts the table into its place in the README, where there is one."""
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        readme.write_text(BLOCK.sub(lambda _: table(results), text), encoding="utf-8")
