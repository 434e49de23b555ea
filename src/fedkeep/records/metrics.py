"""What a set of runs says: how good each method is, by how much it is ahead of another, and how much sooner."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedkeep.records.lines import Evaluation, GistLine
from fedkeep.records.measures import (
    GIST,
    MEASURES,
    Difference,
    MeanOverSeeds,
    difference,
    estimate,
    late_accuracy,
    pooled,
)
from fedkeep.records.reader import Run

BASES = ("fifo", "reservoir")
"""What methods are measured against unless asked otherwise: the first of these that ran."""


@dataclass(frozen=True)
class Ratio:
    """How many times fewer rounds than the base a method needs to reach the base's late accuracy."""

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
    measures: dict[str, MeanOverSeeds]
    """By the names of `MEASURES`."""
    ratios: tuple[Ratio, ...]
    """One per base, in the order asked for."""
    differences: tuple[dict[str, Difference] | None, ...]
    """One per base; None where no seed ran with both, or the base is the method itself."""
    gist: dict[str, MeanOverSeeds]
    """Its trust, likeness, worth and reach over whole runs; empty of a method without a gist."""


@dataclass(frozen=True)
class Comparison:
    """All rows, by task and setting, the base methods first and ODE beside them, and what was left out."""

    bases: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def rounds_to(evaluations: Iterable[Evaluation], target: float) -> int | None:
    """The first round after the start whose evaluation reaches `target`; None if none does."""
    reached = (e.round for e in evaluations if e.round > 0 and e.accuracy is not None and e.accuracy >= target)
    return next(reached, None)


class _Evaluated(Protocol):
    """A run, or what is left of one."""

    @property
    def evaluations(self) -> Sequence[Evaluation]: ...


def speedup(run: _Evaluated, base: _Evaluated) -> float | None:
    """Rounds the base needs to its late accuracy over those the run needs; None if it never gets there."""
    target = late_accuracy(base.evaluations)
    own, others = rounds_to(run.evaluations, target), rounds_to(base.evaluations, target)
    return None if own is None or others is None else others / own


_Seeds = dict[int, Run]
_Key = tuple[str, str, str]


def compare(runs: Iterable[Run], bases: Sequence[str] = ()) -> Comparison:
    """Every method on every task against the base methods, seed by seed.

    FIFO comes first because it is what the paper's "RS" rows are. A seed's target is the late accuracy of
    the base with that same seed, since data and partition change with it.

    >>> from pathlib import Path
    >>> from fedkeep.records.lines import Header
    >>> from fedkeep.records.tables import sentences
    >>> def run(method, seed, accuracy):
    ...     said = {"config": {}, "config_hash": "", "versions": {}, "labels": ("a", "b"), "devices": 1}
    ...     header = Header(run=f"{method}-{seed}", method=method, task="toy", seed=seed, **said)
    ...     return Run(Path(header.run), header, (header, Evaluation(round=10, accuracy=accuracy, loss=0.1)))
    >>> runs = [run("fifo", 0, 0.70), run("fifo", 1, 0.72), run("ode", 0, 0.75), run("ode", 1, 0.78)]
    >>> print(*sentences(compare(runs)))
    ode against fifo is undecided on toy (+5.50 ± 6.35 points): about 3 seeds would decide it.
    """
    groups, notes = _grouped(runs)
    bases = tuple(bases) or tuple(base for base in BASES if any(key[2] == base for key in groups))[:1]
    first = (*bases, *BASES)

    def order(key: _Key) -> tuple[str, str, int, str]:
        task, setting, method = key
        rank = first.index(method) if method in first else len(first) + (not method.startswith("ode"))
        return task, setting, rank, method

    rows = []
    for key in sorted(groups, key=order):
        against = [(base, groups.get((*key[:2], base), {})) for base in bases]
        rows.append(_row(key, groups[key], against))
    return Comparison(bases, tuple(rows), tuple(notes))


def _row(key: _Key, runs: _Seeds, against: Sequence[tuple[str, _Seeds]]) -> Row:
    measures = {name: estimate([of(run.evaluations) for run in runs.values()]) for name, of in MEASURES.items()}
    finished = sum(run.end is not None for run in runs.values())
    ratios = tuple(ratio(runs, base, found) for base, found in against)
    differences = tuple(None if base == key[2] else _differences(runs, found) for base, found in against)
    return Row(*key, len(runs), finished, measures, ratios, differences, _gist(runs))


def _gist(runs: _Seeds) -> dict[str, MeanOverSeeds]:
    seeds = [pooled(lines) for run in runs.values() if (lines := run.of(GistLine))]
    return {name: estimate([getattr(seed, name) for seed in seeds]) for name in GIST} if seeds else {}


def ratio(runs: Mapping[int, _Evaluated], base: str, base_runs: Mapping[int, _Evaluated]) -> Ratio:
    """How much sooner runs get to where those of the base end, by seed."""
    paired = sorted(runs.keys() & base_runs.keys())
    found = [speedup(runs[seed], base_runs[seed]) for seed in paired]
    logs = [math.log(times) for times in found if times is not None]
    value = math.exp(math.fsum(logs) / len(logs)) if logs else None
    return Ratio(base, value, len(logs), len(paired))


def _differences(runs: _Seeds, base_runs: _Seeds) -> dict[str, Difference] | None:
    """Seed by seed, as far as both runs of a seed got."""
    paired = [_as_far_as_both(runs[seed], base_runs[seed]) for seed in sorted(runs.keys() & base_runs.keys())]
    if not paired:
        return None
    return {name: difference([of(own) - of(others) for own, others in paired]) for name, of in MEASURES.items()}


def _as_far_as_both(one: Run, other: Run) -> tuple[list[Evaluation], list[Evaluation]]:
    last = min(one.evaluations[-1].round, other.evaluations[-1].round)
    own, others = ([e for e in run.evaluations if e.round <= last] for run in (one, other))
    return own or list(one.evaluations[:1]), others or list(other.evaluations[:1])


def _grouped(runs: Iterable[Run]) -> tuple[dict[_Key, _Seeds], list[str]]:
    groups: dict[_Key, _Seeds] = {}
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
