"""The tables that programmes end in: means with their intervals, and differences seed by seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.records.student import interval
from lab.curves import Curves
from lab.programme import Programme, Row, read_programme
from lab.summaries import Curve

Interval = list[float | None]
"""A mean in percent and half of its 95 % interval, None of a single seed."""

FIFO, BALANCED, UNLIMITED = "fifo", "class-balanced-fifo", "full-data"
GISTS = ("gist-local", "gist-shared")


@dataclass(frozen=True)
class Findings:
    """What the runs of a programme say, as far as they were made."""

    programme: Programme
    curves: Curves

    def tasks(self) -> list[str]:
        """Those that a stage names, in that order."""
        return list(dict.fromkeys(task for stage in self.programme.stages for task in stage.tasks))

    def methods(self, task: str) -> list[str]:
        named = [m for stage in self.programme.stages if task in stage.tasks for m in stage.methods]
        return list(dict.fromkeys(named))

    def runs(self, row: Row, rate: float = 1.0) -> dict[int, Curve]:
        """By seed."""
        seeds = sorted({seed for stage in self.programme.stages for seed in stage.seeds})
        found = [self.curves.find(run.digest) for run in self.programme.reported(row, rate, seeds)]
        return {curve.seed: curve for curve in found if curve is not None}

    def own_runs(self, row: Row) -> dict[int, Curve]:
        """At the method's own rate; none until it is found."""
        own = self.programme.own_rate(row, self.curves)
        return {} if own is None else self.runs(row, own)

    def rate(self, row: Row) -> float | None:
        """The method's own learning rate, None until it is found."""
        own = self.programme.own_rate(row, self.curves)
        shared = float(self.programme.tasks[row.task]["train"]["learning_rate"])
        return None if own is None else shared * own


def write_tables(experiments: Path, curves: Curves) -> None:
    """Writes what every programme ends in, from all runs there are, into `experiments/results`."""
    results = experiments / "results"

    def findings(name: str) -> Findings:
        return Findings(read_programme(experiments / "programmes" / f"{name}.toml"), curves)

    _write(results / "arena.json", arena(findings("arena")))


def _write(path: Path, table: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def arena(found: Findings) -> dict[str, dict[str, Any]]:
    """By task and method: accuracy at the task's rate and at the method's own, and the lead over FIFO at own rates."""
    table: dict[str, dict[str, Any]] = {}
    for task in found.tasks():
        rows = {method: _arena_row(found, Row(task, method)) for method in found.methods(task)}
        if ran := {method: row for method, row in rows.items() if row is not None}:
            table[task] = ran
    return table


def _arena_row(found: Findings, row: Row) -> dict[str, Any] | None:
    shared, own = found.runs(row), found.own_runs(row)
    if not shared and not own:
        return None
    fifo = Row(row.task, FIFO)
    shown = own or shared
    return {
        "own_rate": summed(c.final for c in own.values()),
        "shared_rate": summed(c.final for c in shared.values()),
        "rate": found.rate(row),
        "seeds": len(shown),
        "over_fifo": ahead(own, found.own_runs(fifo)),
        "over_fifo_shared": ahead(shared, found.runs(fifo)),
        "rounds": max(c.planned for c in shown.values()),
        "worst_tenth": _mean([c.worst_tenth for c in shown.values()]),
        "rare_recall": _mean([c.rare_recall for c in shown.values()]),
        "prequential": _mean([c.prequential for c in shown.values()]),
        "samples_valued": _mean([c.samples_valued / 100 for c in shown.values()]),
        "samples_trained": _mean([c.samples_trained / 100 for c in shown.values()]),
    }


def gist_rows(found: Findings, task: str) -> list[dict[str, Any]]:
    """Every method of a task at every rate: the finals of all seeds, and the lead over FIFO at the same rate."""
    rows = []
    for method in found.methods(task):
        for rate in found.programme.choice.rates:
            runs = found.runs(Row(task, method), rate)
            if runs:
                finals = {seed: round(curve.final, 2) for seed, curve in runs.items()}
                rows.append(
                    {
                        "method": method,
                        "rate": round(rate, 3),
                        "rounds": max(curve.planned for curve in runs.values()),
                        "seeds": list(finals),
                        "finals": list(finals.values()),
                        "mean": summed(curve.final for curve in runs.values()),
                        "over_fifo": ahead(runs, found.runs(Row(task, FIFO), rate)),
                    }
                )
    return rows


def gist_summary(found: Findings) -> dict[str, dict[str, float | None]]:
    """By task, at its rate and in percent; `gap_closed` is the better gist's share of what FIFO lacks."""
    table = {}
    for task in found.tasks():
        means = {m: _mean([c.final / 100 for c in found.runs(Row(task, m)).values()]) for m in found.methods(task)}
        gists = [means[m] for m in GISTS if means.get(m) is not None]
        table[task] = {
            "fifo": means.get(FIFO),
            **{method.replace("-", "_"): means.get(method) for method in GISTS},
            "unlimited": means.get(UNLIMITED),
            "gap_closed": share_closed(means.get(FIFO), max(gists, default=None), means.get(UNLIMITED)),  # type: ignore[type-var]
        }
    return table


def share_closed(fifo: float | None, method: float | None, unlimited: float | None) -> float | None:
    """How much of the distance from FIFO to unlimited storage a method covers; None where there is none to cover."""
    if fifo is None or method is None or unlimited is None or unlimited <= fifo:
        return None
    return round((method - fifo) / (unlimited - fifo), 3)


def settings_table(found: Findings) -> dict[str, dict[str, dict[str, Interval]]]:
    """By task, setting and method: accuracy at the task's rate."""
    table: dict[str, dict[str, dict[str, Interval]]] = {}
    for stage in found.programme.stages:
        for row in found.programme.rows(stage):
            if runs := found.runs(row):
                place = table.setdefault(row.task, {}).setdefault(row.setting_name, {})
                place[row.method] = summed(curve.final for curve in runs.values()) or []
    return table


def summed(values: Iterable[float]) -> Interval | None:
    """Mean and half of the interval; None of nothing."""
    known = list(values)
    if not known:
        return None
    half = interval(known)
    return [round(math.fsum(known) / len(known), 2), None if half is None else round(half, 2)]


def ahead(runs: dict[int, Curve], others: dict[int, Curve]) -> Interval | None:
    """The mean difference over the seeds that both have."""
    return summed(runs[seed].final - others[seed].final for seed in sorted(runs.keys() & others.keys()))


def _mean(shares: Sequence[float | None]) -> float | None:
    """In percent."""
    known = [share for share in shares if share is not None]
    return round(100 * math.fsum(known) / len(known), 2) if known else None
