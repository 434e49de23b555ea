"""What the runs of a programme say: means with their intervals, and differences seed by seed."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedkeep.records.measures import interval
from fedkeep.sim.experiment import Experiment
from lab.curves import Curve, Curves
from lab.programme import Contest, Programme

FIFO, BALANCED, UNLIMITED = "fifo", "class-balanced-fifo", "full-data"
GISTS = ("gist-local", "gist-shared")
PREQUENTIAL = (("record.prequential", True),)
"""The setting in which runs are also tested on what arrives."""
LEVEL, SLIGHT = 1.0, 0.5
"""Points of accuracy within which two methods count as level, and a gap as none."""


class Interval(NamedTuple):
    """A mean over seeds and half of its 95 % interval, None of a single seed; in JSON a list of the two."""

    mean: float
    half_width: float | None

    @property
    def ahead(self) -> bool | None:
        """Of a difference, whether it is above 0; None where the interval holds 0, so that more seeds have to tell."""
        return None if self.half_width is None or abs(self.mean) <= self.half_width else self.mean > 0

    @property
    def keeps_up(self) -> bool | None:
        """Of a difference, whether less than a point is sure to be lost; None where more seeds have to tell."""
        if self.half_width is not None and self.mean - self.half_width > -LEVEL:
            return True
        return False if self.ahead is False else None

    def rounded(self) -> "Interval":
        return Interval(round(self.mean, 2), None if self.half_width is None else round(self.half_width, 2))

    def __str__(self) -> str:
        return in_words(self, "+")


@dataclass(frozen=True)
class Findings:
    """The finished runs of a programme, as far as they were made."""

    programme: Programme
    curves: Curves

    def tasks(self) -> list[str]:
        """Those that a stage names, in the order of the file: those in the order of time come first there."""
        named = {task for stage in self.programme.stages for task in stage.tasks}
        return [task for task in self.programme.tasks if task in named]

    def methods(self, task: str) -> list[str]:
        named = [m for stage in self.programme.stages if task in stage.tasks for m in stage.methods]
        return list(dict.fromkeys(named))

    def runs(self, row: Contest, rate: float = 1.0) -> dict[int, Curve]:
        """By seed, at this many times the task's learning rate; none of what the programme does not have."""
        if row.task not in self.programme.tasks or row.method not in self.programme.methods:
            return {}
        seeds = sorted({seed for stage in self.programme.stages for seed in stage.seeds})
        found = [self.curves.find(run.digest) for run in self.programme.reported(row, rate, seeds)]
        return {curve.seed: curve for curve in found if curve is not None}

    def ran(self) -> Iterator[tuple[Contest, dict[int, Curve]]]:
        """Every row of the stages that has runs at the task's rate."""
        rows = (row for stage in self.programme.stages for row in self.programme.rows(stage))
        yield from ((row, runs) for row in rows if (runs := self.runs(row)))

    def own_runs(self, row: Contest) -> dict[int, Curve]:
        """At the method's own rate; none until it is found."""
        own = self.programme.own_rate(row, self.curves)
        return {} if own is None else self.runs(row, own)

    def own_rate(self, row: Contest) -> float | None:
        """The method's own learning rate, None until it is found."""
        own = self.programme.own_rate(row, self.curves)
        shared = float(self.programme.tasks[row.task]["train"]["learning_rate"])
        return None if own is None else shared * own

    def experiment(self, row: Contest) -> Experiment:
        """The row's settings, at any seed."""
        return self.programme.reported(row, 1.0, (0,))[0].cell.experiment


def summed(values: Iterable[float]) -> Interval | None:
    """None of nothing."""
    known = list(values)
    return Interval(math.fsum(known) / len(known), interval(known)) if known else None


def finals(runs: Mapping[int, Curve]) -> Interval | None:
    """The final accuracy."""
    return summed(curve.final for curve in runs.values())


def ahead(runs: Mapping[int, Curve], others: Mapping[int, Curve]) -> Interval | None:
    """The difference in final accuracy over the seeds that both have."""
    return summed(runs[seed].final - others[seed].final for seed in sorted(runs.keys() & others.keys()))


def in_words(value: Sequence[float | None] | None, sign: str = "") -> str:
    """ "61.2 ± 0.8", or that it was not run."""
    if value is None:
        return "not run"
    return f"{value[0]:{sign}.1f}" + ("" if value[1] is None else f" ± {value[1]:.1f}")


def share_closed(fifo: float | None, method: float | None, unlimited: float | None) -> float | None:
    """How much of the distance from FIFO to unlimited storage a method covers; None where there is none to cover."""
    if fifo is None or method is None or unlimited is None or unlimited <= fifo:
        return None
    return round((method - fifo) / (unlimited - fifo), 3)
