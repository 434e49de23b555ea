"""The committed results: summaries of experiments, and the figures of programs that are no experiment."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.records.measures import interval
from lab.curves import Curve, ExperimentSummary, read_summary

LEVEL = 1.0
"""Points of accuracy within which two methods count as level."""

_TABLES = {"curves", "gist"}
"""Folders of the programmes, which have tables of their own."""


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


@dataclass(frozen=True)
class Shown:
    """One method in one setting of one experiment."""

    mean: float
    """Final accuracy in percent."""
    half_width: float | None
    speedup: float | None
    """Against FIFO, the geometric mean over seeds; None where the method never reached FIFO's final accuracy."""
    reached: int
    seeds: int


class Results:
    """What has been run so far."""

    def __init__(self, directory: Path) -> None:
        paths = sorted(p for p in directory.glob("*/*.json") if p.parent.name not in _TABLES)
        self.summaries: dict[str, ExperimentSummary] = {(s := read_summary(path)).experiment: s for path in paths}
        self.directory = directory
        self.figures: dict[str, dict[str, Any]] = {p.stem: json.loads(p.read_text()) for p in directory.glob("*.json")}

    def methods(self, experiment: str) -> list[str]:
        """The methods in the order of the experiment's file."""
        return list(dict.fromkeys(curve.method for curve in self.summaries[experiment].curves))

    def settings(self, experiment: str) -> list[str]:
        return list(dict.fromkeys(curve.setting for curve in self.summaries[experiment].curves))

    def runs(self, experiment: str, method: str, setting: str | None = None) -> dict[int, Curve]:
        """A method's runs by seed, in the first setting unless one is named; none of what did not run."""
        if experiment not in self.summaries:
            return {}
        chosen = self.settings(experiment)[:1] if setting is None else [setting]
        curves = self.summaries[experiment].curves
        return {c.seed: c for c in curves if c.method == method and c.setting in chosen and c.rounds}

    def shown(self, experiment: str, method: str, setting: str | None = None) -> Shown | None:
        """A method's numbers; None where it did not run."""
        runs, fifo = (self.runs(experiment, name, setting) for name in (method, "fifo"))
        if not runs:
            return None
        found = [_speedup(runs[seed], fifo[seed]) for seed in sorted(runs.keys() & fifo.keys())]
        logs = [math.log(ratio) for ratio in found if ratio is not None]
        finals = [curve.final for curve in runs.values()]
        speedup = math.exp(math.fsum(logs) / len(logs)) if logs else None
        return Shown(math.fsum(finals) / len(finals), interval(finals), speedup, len(logs), len(finals))

    def margin(self, experiment: str, one: str, other: str) -> Margin | None:
        """How far `one` is ahead of `other`, over the seeds that ran with both; None where none did."""
        a, b = self.runs(experiment, one), self.runs(experiment, other)
        found = [a[seed].final - b[seed].final for seed in sorted(a.keys() & b.keys())]
        return Margin(math.fsum(found) / len(found), interval(found)) if found else None

    def curves(self, experiment: str, setting: str) -> Iterator[tuple[str, list[tuple[float, float]]]]:
        """Every method's accuracy by round, in percent, the mean over its seeds."""
        for method in self.methods(experiment):
            if runs := self.runs(experiment, method, setting):
                yield method, mean_curve(list(runs.values()))


def mean_curve(curves: list[Curve]) -> list[tuple[float, float]]:
    """Accuracy by round in percent, the mean over runs, as far as all of them got."""
    heights = zip(*(curve.accuracy for curve in curves), strict=False)
    rounds = min((curve.rounds for curve in curves), key=len)
    return [(float(r), 100 * math.fsum(a or 0.0 for a in at) / len(at)) for r, at in zip(rounds, heights, strict=True)]


def _speedup(run: Curve, base: Curve) -> float | None:
    """Rounds the base needs to its final accuracy over those the run needs; None if it never gets there."""
    own, others = run.rounds_to(base.late), base.rounds_to(base.late)
    return None if own is None or others is None else others / own
