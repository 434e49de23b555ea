"""The committed results: summaries of experiments, and the figures of programs that are no experiment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.records import compare
from fedkeep.records.measures import late_accuracy
from fedkeep.records.metrics import Row
from fedkeep.records.student import interval
from lab.summaries import ExperimentSummary, as_runs, read_summary

LEVEL = 1.0
"""Points of accuracy within which two methods count as level."""

_TABLES = {"curves", "gist"}
"""Folders of the programmes, which have tables of their own."""


@dataclass(frozen=True)
class Shown:
    """One method in one setting of one experiment."""

    mean: float
    """Final accuracy in percent."""
    half_width: float | None
    speedup: float | None
    """Against FIFO; None where the method never reached FIFO's final accuracy."""
    reached: int
    seeds: int


@dataclass(frozen=True)
class Margin:
    """By how many points one method is ahead of another, seed by seed: both saw the same data in the same order."""

    mean: float
    half_width: float | None
    """Of its 95 % interval; None of a single seed."""

    @property
    def ahead(self) -> bool | None:
        """Whether the one is ahead; None where the interval holds 0, so that more seeds have to tell."""
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return None
        return self.mean > 0

    @property
    def keeps_up(self) -> bool | None:
        """Whether the one is sure to lose less than what counts as level; None where more seeds have to tell."""
        if self.half_width is not None and self.mean - self.half_width > -LEVEL:
            return True
        return False if self.ahead is False else None

    def __str__(self) -> str:
        return f"{self.mean:+.1f}" + ("" if self.half_width is None else f" ± {self.half_width:.1f}")


class Results:
    """What has been run so far."""

    def __init__(self, directory: Path) -> None:
        paths = sorted(p for p in directory.glob("*/*.json") if p.parent.name not in _TABLES)
        self.summaries: dict[str, ExperimentSummary] = {(s := read_summary(path)).experiment: s for path in paths}
        self.directory = directory
        self.figures: dict[str, dict[str, Any]] = {p.stem: json.loads(p.read_text()) for p in directory.glob("*.json")}
        self._rows = {name: _rows(summary) for name, summary in self.summaries.items()}
        self._finals = {name: _finals(summary) for name, summary in self.summaries.items()}

    def has(self, experiment: str) -> bool:
        return experiment in self.summaries

    def methods(self, experiment: str) -> list[str]:
        """The methods in the order of the experiment's file."""
        return list(dict.fromkeys(curve.method for curve in self.summaries[experiment].curves))

    def seeds(self, experiment: str) -> dict[str, set[int]]:
        """The seeds that every method ran with."""
        found: dict[str, set[int]] = {}
        for curve in self.summaries[experiment].curves:
            found.setdefault(curve.method, set()).add(curve.seed)
        return found

    def settings(self, experiment: str) -> list[str]:
        return list(dict.fromkeys(curve.setting for curve in self.summaries[experiment].curves))

    def shown(self, experiment: str, method: str, setting: str | None = None) -> Shown | None:
        """A method's numbers, in the only setting unless one is named; None where it did not run."""
        rows = self._rows.get(experiment, {})
        if setting is not None:
            return rows.get((method, setting))
        return next((row for (name, _), row in rows.items() if name == method), None)

    def margin(self, experiment: str, one: str, other: str, setting: str | None = None) -> Margin | None:
        """How far `one` is ahead of `other`, over the seeds that ran with both; None where none did."""
        chosen = setting if setting is not None else self.settings(experiment)[0]
        a, b = (self._finals[experiment].get((method, chosen), {}) for method in (one, other))
        found = [100 * (a[seed] - b[seed]) for seed in sorted(a.keys() & b.keys())]
        return Margin(math.fsum(found) / len(found), interval(found)) if found else None

    def curves(self, experiment: str, setting: str) -> Iterator[tuple[str, list[tuple[float, float]]]]:
        """Every method's accuracy by round, in percent, the mean over its seeds."""
        for method in self.methods(experiment):
            chosen = [c for c in self.summaries[experiment].curves if (c.method, c.setting) == (method, setting)]
            if chosen:
                shortest = min(chosen, key=lambda c: len(c.rounds))
                yield (
                    method,
                    [
                        (float(r), 100 * math.fsum(c.accuracy[k] or 0.0 for c in chosen) / len(chosen))
                        for k, r in enumerate(shortest.rounds)
                    ],
                )


def _rows(summary: ExperimentSummary) -> dict[tuple[str, str], Shown]:
    comparison = compare(as_runs(summary), ("fifo",))
    return {(row.method, row.setting): _shown(row) for row in comparison.rows}


def _finals(summary: ExperimentSummary) -> dict[tuple[str, str], dict[int, float]]:
    """The final accuracy of every run, by method and setting, then by seed."""
    finals: dict[tuple[str, str], dict[int, float]] = {}
    for run in as_runs(summary):
        if run.evaluations:
            finals.setdefault((run.header.method, run.header.setting), {})[run.header.seed] = late_accuracy(
                run.evaluations
            )
    return finals


def _shown(row: Row) -> Shown:
    ratio = row.ratios[0]
    half = None if row.late.half_width is None else 100 * row.late.half_width
    return Shown(100 * row.late.mean, half, ratio.value, ratio.reached, row.seeds)
