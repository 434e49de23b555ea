"""What a set of runs says: final accuracy, and how much sooner than a base method each method gets there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedkeep.records.lines import Evaluation
from fedkeep.records.reader import Run
from fedkeep.records.student import interval

LAST = 5
"""Evaluations that a final accuracy is the mean of."""


@dataclass(frozen=True)
class Ratio:
    """How many times fewer rounds than the base a method needs to reach the base's final accuracy."""

    base: str
    value: float | None
    """The geometric mean over the seeds that reached it; None where none did."""
    reached: int
    seeds: int
    """Seeds run with both methods."""


@dataclass(frozen=True)
class Row:
    """One method on one task, over its seeds."""

    task: str
    setting: str
    method: str
    seeds: int
    finished: int
    accuracy: float
    """The mean over seeds of the final accuracy."""
    half_width: float | None
    """Of its 95 % interval by Student's t; None of a single seed."""
    ratios: tuple[Ratio, ...]
    """One per base, in the order asked for."""


@dataclass(frozen=True)
class Comparison:
    """All rows, by task and setting, the base methods first and ODE beside them, and what was left out."""

    bases: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def final_accuracy(evaluations: Sequence[Evaluation]) -> float | None:
    """The mean accuracy of the last five evaluations, 0 where it diverged; None where there are none.

    That of the untrained model, before the first round, counts only where there is no other.
    """
    trained = [e for e in evaluations if e.round > 0] or evaluations
    last = [e.accuracy or 0.0 for e in trained[-LAST:]]
    return math.fsum(last) / len(last) if last else None


def rounds_to(evaluations: Iterable[Evaluation], target: float) -> int | None:
    """The first round after the start whose evaluation reaches `target`; None if none does."""
    reached = (e.round for e in evaluations if e.round > 0 and e.accuracy is not None and e.accuracy >= target)
    return next(reached, None)


def speedup(run: Run, base: Run) -> float | None:
    """Rounds the base needs to its final accuracy over those the run needs; None if it never gets there."""
    target = final_accuracy(base.evaluations)
    if target is None:
        return None
    own, others = rounds_to(run.evaluations, target), rounds_to(base.evaluations, target)
    return None if own is None or others is None else others / own


_Seeds = dict[int, Run]


def _ratio(runs: _Seeds, base: str, base_runs: _Seeds) -> Ratio:
    paired = sorted(runs.keys() & base_runs.keys())
    found = [speedup(runs[seed], base_runs[seed]) for seed in paired]
    logs = [math.log(ratio) for ratio in found if ratio is not None]
    value = math.exp(math.fsum(logs) / len(logs)) if logs else None
    return Ratio(base, value, len(logs), len(paired))


def _row(key: tuple[str, str, str], runs: _Seeds, ratios: tuple[Ratio, ...]) -> Row:
    finals = [final for run in runs.values() if (final := final_accuracy(run.evaluations)) is not None]
    finished = sum(run.end is not None for run in runs.values())
    return Row(*key, len(runs), finished, math.fsum(finals) / len(finals), interval(finals), ratios)


def compare(runs: Iterable[Run], bases: Sequence[str] = ("fifo", "reservoir")) -> Comparison:
    """Every method on every task against the base methods, seed by seed.

    FIFO comes first because it is what the paper's "RS" rows are. A seed's target is the final accuracy of
    the base with that same seed, since data and partition change with it.
    """
    groups, notes = _grouped(runs)

    def order(key: tuple[str, str, str]) -> tuple[str, str, int, str]:
        task, setting, method = key
        rank = bases.index(method) if method in bases else len(bases) + (not method.startswith("ode"))
        return task, setting, rank, method

    rows = []
    for key in sorted(groups, key=order):
        base_runs = {base: groups.get((*key[:2], base), {}) for base in bases}
        ratios = tuple(_ratio(groups[key], base, found) for base, found in base_runs.items())
        rows.append(_row(key, groups[key], ratios))
    return Comparison(tuple(bases), tuple(rows), tuple(notes))


def _grouped(runs: Iterable[Run]) -> tuple[dict[tuple[str, str, str], _Seeds], list[str]]:
    groups: dict[tuple[str, str, str], _Seeds] = {}
    notes: list[str] = []
    unfinished: list[str] = []
    for run in runs:
        header = run.header
        if not run.evaluations:
            notes.append(f"{header.run}: left out, no evaluation yet")
            continue
        seeds = groups.setdefault((header.task, header.setting, header.method), {})
        if header.seed in seeds:
            notes.append(f"{header.run}: left out, {seeds[header.seed].header.run} has the same task, method and seed")
            continue
        seeds[header.seed] = run
        notes += _mostly_refused(run)
        if run.end is None:
            unfinished.append(f"{header.run} (round {run.evaluations[-1].round})")
    if unfinished:
        notes.append(f"not finished, counted as far as they got: {', '.join(unfinished)}")
    return groups, notes


def _mostly_refused(run: Run) -> list[str]:
    """A note if most of a run's reports did not count: its accuracy then says little of its method."""
    reasons: Counter[str] = Counter()
    reports = 0
    for line in run.rounds:
        reasons.update(line.refused_reports)
        reports += line.participations or len(line.participants)
    refused = reasons.total() - reasons["weight-cut"]
    if 2 * refused <= reports:
        return []
    reason = max(reasons, key=lambda name: (name != "weight-cut", reasons[name]))
    return [f"{run.header.run}: {refused} of {reports} reports were refused, most of them for '{reason}'"]
