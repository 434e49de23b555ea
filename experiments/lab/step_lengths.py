"""What the runs of `steps.py` say: methods at the same rate, at the same path, at their best."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.records.measures import interval
from lab.blocks import sheet
from lab.findings import Interval, in_words

STREAM_LENGTH = "-stream-length"
"""How the names of arms end whose updates have the length of their streams' gradients."""
_TITLES = {
    "fifo": "FIFO",
    "ode-est-participants": "ODE-Est (participants' mean)",
    "ode-est": "ODE-Est (Eq. 8)",
    "default": "our default",
}
_LAST = 5
"""Evaluations that a final accuracy is the mean of."""


def steps_table(experiments: Path, results: Path) -> str:
    """Accuracy by learning rate, and the lead over FIFO where both have travelled equally far."""
    del experiments
    path = results / "steps.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    by_task: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_task.setdefault(run["task"], []).append(run)
    if "ic" not in by_task:
        by_task["ic"] = []
    tables = [_task_table(task, by_task[task]) for task in sorted(by_task, reverse=True)]
    return "\n\n".join(tables)


def _task_table(task: str, runs: Sequence[dict[str, Any]]) -> str:
    """The methods of one task, with the seeds that they ran with; of long runs, if there are."""
    if not runs:
        return f"{task}: not run yet; `python experiments/steps.py --tasks {task}` makes it."
    longest = max(run["rounds"][-1] for run in runs)
    runs = [run for run in runs if run["rounds"][-1] == longest]
    multiples = sorted({float(run["multiple"]) for run in runs})
    arms = dict(_TITLES)
    for method, title in _TITLES.items():
        arms[method + STREAM_LENGTH] = f"{title}, steps of the stream's length"
    rows = []
    for method in (name for name in arms if any(run["method"] == name for run in runs)):
        cells = [_by_rate(runs, method, multiple) for multiple in multiples]
        travelled = (_relative_path(runs, method), _at_equal_path(runs, method))
        rows.append((arms[method], *cells, *travelled))
    heads = [f"{multiple:g} x the printed rate" for multiple in multiples]
    table = sheet(("method", *heads, "path over FIFO's", "lead at FIFO's equal path"), rows)
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    return f"Task `{task}` of Table 2, seeds {seeds}, {longest} rounds:\n\n{table}"


def final_accuracy(run: dict[str, Any]) -> float:
    """Return the mean accuracy of the last evaluations, in percent."""
    last = run["accuracy"][-_LAST:]
    return 100 * math.fsum(last) / float(len(last))


def accuracy_at(run: dict[str, Any], path: float) -> float | None:
    """Return the accuracy in percent where the run's path had this length; None if it never had."""
    if path > run["path"][-1]:
        return None
    return 100 * float(np.interp(path, run["path"], run["accuracy"]))


def lead_at_equal_path(run: dict[str, Any], others: Sequence[dict[str, Any]]) -> float | None:
    """Return a run's last accuracy less the others' at the same path.

    Of the others the one with the smallest learning rate that gets as far.
    """
    for other in sorted(others, key=lambda found: float(found["multiple"])):
        if (reached := accuracy_at(other, run["path"][-1])) is not None:
            return 100 * float(run["accuracy"][-1]) - reached
    return None


def _of(runs: Sequence[dict[str, Any]], method: str, multiple: float) -> dict[int, dict[str, Any]]:
    found = (run for run in runs if run["method"] == method and run["multiple"] == multiple)
    return {run["seed"]: run for run in found}


def _by_rate(runs: Sequence[dict[str, Any]], method: str, multiple: float) -> str:
    """FIFO's accuracy at a rate, or another method's lead over FIFO at the same rate.

    Over a FIFO with steps of the stream's length, where the method has them too.
    """
    base = "fifo" + STREAM_LENGTH if method.endswith(STREAM_LENGTH) else "fifo"
    own, fifo = _of(runs, method, multiple), _of(runs, base, multiple)
    if method == base:
        return in_words(_interval([final_accuracy(run) for run in own.values()]))
    both = own.keys() & fifo.keys()
    leads = [final_accuracy(own[seed]) - final_accuracy(fifo[seed]) for seed in both]
    return in_words(_interval(leads), "+")


def _relative_path(runs: Sequence[dict[str, Any]], method: str) -> str:
    """How much farther the model travels than FIFO's at the printed rate."""
    own, fifo = _of(runs, method, 1.0), _of(runs, "fifo", 1.0)
    ratios = [own[seed]["path"][-1] / fifo[seed]["path"][-1] for seed in own.keys() & fifo.keys()]
    return f"{math.fsum(ratios) / len(ratios):.2f}" if ratios else "not run"


def _at_equal_path(runs: Sequence[dict[str, Any]], method: str) -> str:
    """The lead at the printed rate over FIFO at whatever rate takes it as far."""
    own = _of(runs, method, 1.0)
    fifos = [run for run in runs if run["method"] == "fifo"]
    leads = [
        lead
        for seed, run in own.items()
        if (lead := lead_at_equal_path(run, [f for f in fifos if f["seed"] == seed])) is not None
    ]
    return "none" if method == "fifo" else in_words(_interval(leads), "+")


def _interval(values: Sequence[float]) -> Interval | None:
    return Interval(math.fsum(values) / len(values), interval(values)) if values else None
