"""What one run's curve comes to in one number, what such numbers say over seeds, and what a set of runs says.

How good each method is, by how much it is ahead of another by Student's t, and how much sooner it gets there.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedkeep.core.planning.plan import Plan
from fedkeep.records.lines import Evaluation, GistLine, PlanLine, Round
from fedkeep.records.runs import Run

LISTED = 50
"""Devices that lines list: the first ones, the same in all lines."""
LAST = 5
"""Evaluations that a late accuracy is the mean of."""
LEVEL = 0.01
"""Differences of accuracy that count as none: one point."""
MOST_SEEDS = 200
"""More seeds than this nobody is advised to run."""
BASES = ("fifo", "reservoir")
"""What methods are measured against unless asked otherwise: the first of these that ran."""
GIST = ("trust", "likeness", "worth", "reach")


@dataclass(frozen=True)
class MeanOverSeeds:
    mean: float
    half_width: float | None
    """Of its 95 % interval by Student's t; None of a single seed."""
    seeds: int


@dataclass(frozen=True)
class Difference(MeanOverSeeds):
    """By how much a method differs from another, paired over the seeds that both ran."""

    verdict: str
    """`better` or `worse` where the interval excludes 0, `equivalent` within a point, or `inconclusive`."""
    seeds_to_decide: int | None
    """How many seeds would decide it if they differed as these do; None where it is decided, or none would."""


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


def coverage(t: float, freedom: int) -> float:
    """P(|T| <= t) for whole degrees of freedom: a finite series in the cosine of atan(t / sqrt(freedom))."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    series = math.sin(angle) * total
    return (angle + series) * 2 / math.pi if odd else series


def quantile(level: float, freedom: int) -> float:
    """The t whose two-sided coverage is `level`, found by bisection."""
    low, high = 0.0, 1.0
    while coverage(high, freedom) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if coverage(middle, freedom) < level else (low, middle)
    return high


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % interval; None of fewer than two values."""
    if len(values) < 2:
        return None
    return quantile(0.95, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def estimate(values: Sequence[float]) -> MeanOverSeeds:
    """The mean of one value a seed, and its interval."""
    return MeanOverSeeds(math.fsum(values) / len(values), interval(values), len(values))


def difference(values: Sequence[float]) -> Difference:
    """What one difference a seed says.

    >>> difference([0.030, 0.021, 0.027]).verdict
    'better'
    >>> found = difference([0.030, -0.021, 0.027])
    >>> found.verdict, found.seeds_to_decide
    ('inconclusive', 25)
    """
    found = estimate(values)
    size, half, seeds = abs(found.mean), found.half_width, found.seeds
    verdict, more = "inconclusive", None
    if half is not None and size > half:
        verdict = "better" if found.mean > 0 else "worse"
    elif half is not None and size + half <= LEVEL:
        verdict = "equivalent"
    elif half is not None:
        deviation = half * math.sqrt(seeds) / quantile(0.95, seeds - 1)
        reach = max(size, LEVEL - size)
        enough = (
            quantile(0.95, n - 1) * deviation / math.sqrt(n) < reach
            for n in range(seeds + 1, MOST_SEEDS + 1)
        )
        more = next((n for n, decides in enumerate(enough, start=seeds + 1) if decides), None)
    return Difference(found.mean, half, seeds, verdict, more)


def final_accuracy(evaluations: Sequence[Evaluation]) -> float:
    """The accuracy of the last evaluation, 0 where it diverged."""
    return evaluations[-1].accuracy or 0.0


def late_accuracy(evaluations: Sequence[Evaluation], of: int = 1) -> float:
    """The mean accuracy of the last five evaluations, of 1 or of 100.

    The untrained model's counts only where there is no other.
    """
    last = [e.accuracy or 0.0 for e in _trained(evaluations)[-LAST:]]
    return of * math.fsum(last) / len(last)


def best_accuracy(evaluations: Sequence[Evaluation]) -> float:
    """The highest accuracy of any evaluation after training began."""
    return max(e.accuracy or 0.0 for e in _trained(evaluations))


def mean_accuracy(evaluations: Sequence[Evaluation]) -> float:
    """The mean accuracy over all rounds: the area under the curve, by the rounds it spans."""
    pairs = list(pairwise(evaluations))
    rounds = sum(b.round - a.round for a, b in pairs)
    if not rounds:
        return final_accuracy(evaluations)
    halves = (
        ((a.accuracy or 0.0) + (b.accuracy or 0.0)) / 2 * (b.round - a.round) for a, b in pairs
    )
    return math.fsum(halves) / rounds


MEASURES: Mapping[str, Callable[[Sequence[Evaluation]], float]] = {
    "final": final_accuracy,
    "best": best_accuracy,
    "mean_accuracy": mean_accuracy,
    "late": late_accuracy,
}
"""What a curve may be judged by; each takes one evaluation or more."""


def _trained(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    return [e for e in evaluations if e.round > 0] or evaluations


def gist_line(round_: int, figures: Sequence[Sequence[float]]) -> GistLine:
    """What the gists of some participations did: the mean of each figure, which stand in the order of `GIST`."""
    means = dict(zip(GIST, np.mean(figures, axis=0).tolist(), strict=True))
    return GistLine(round=round_, participations=len(figures), **means)


def plan_line(
    round_: int, plan: Plan, clients_per_label: int | None, regions: Iterable[str] = ()
) -> PlanLine:
    """A plan as it is recorded: of many devices the first only."""
    return PlanLine(
        round=round_,
        devices=tuple(plan.devices[:LISTED].tolist()),
        quotas=tuple(map(tuple, plan.quotas[:LISTED].tolist())),
        holders=tuple(plan.holders.tolist()),
        wanted=(clients_per_label or 0,) * len(plan.holders),
        regions=tuple(regions),
    )


def pooled(lines: Sequence[GistLine]) -> GistLine:
    """One line for several, each counting by its participations, the median for the reach; there is at least one."""
    count = sum(line.participations for line in lines)
    sums = {
        name: math.fsum(getattr(line, name) * line.participations for line in lines)
        for name in GIST
    }
    means = {name: total / max(count, 1) for name, total in sums.items()}
    # A ratio: where the stored samples' gradient all but vanishes, one line would be all that a mean tells of.
    means["reach"] = statistics.median(line.reach for line in lines)
    return GistLine(round=lines[-1].round, participations=count, **means)


def rounds_to(evaluations: Iterable[Evaluation], target: float) -> int | None:
    """The first round after the start whose evaluation reaches `target`; None if none does."""
    reached = (
        e.round
        for e in evaluations
        if e.round > 0 and e.accuracy is not None and e.accuracy >= target
    )
    return next(reached, None)


_Key = tuple[str, str, str]
_Curves = Mapping[int, Sequence[Evaluation]]
"""The evaluations of runs that differ in their seed alone, by seed."""


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
    ode against fifo is inconclusive on toy (+5.50 ± 6.35 points): about 3 seeds would decide it.
    """
    groups, notes = _grouped(runs)
    bases = (
        tuple(bases) or tuple(base for base in BASES if any(key[2] == base for key in groups))[:1]
    )
    first = (*bases, *BASES)

    def order(key: _Key) -> tuple[str, str, int, str]:
        task, setting, method = key
        rank = (
            first.index(method) if method in first else len(first) + (not method.startswith("ode"))
        )
        return task, setting, rank, method

    rows = (_row(key, groups, bases) for key in sorted(groups, key=order))
    return Comparison(bases, tuple(rows), tuple(notes))


def _row(key: _Key, groups: Mapping[_Key, Mapping[int, Run]], bases: Sequence[str]) -> Row:
    runs = groups[key]
    curves = {seed: run.evaluations for seed, run in runs.items()}
    measures = {name: estimate(list(map(of, curves.values()))) for name, of in MEASURES.items()}
    finished = sum(run.end is not None for run in runs.values())
    gists = [pooled(lines) for run in runs.values() if (lines := run.of(GistLine))]
    gist = (
        {name: estimate([getattr(seed, name) for seed in gists]) for name in GIST} if gists else {}
    )
    ratios, differences = [], []
    for base in bases:
        others = {seed: run.evaluations for seed, run in groups.get((*key[:2], base), {}).items()}
        ratios.append(ratio(curves, base, others))
        paired = []
        for seed in (
            sorted(curves.keys() & others.keys()) if base != key[2] else ()
        ):  # as far as both runs of it got
            both = (curves[seed], others[seed])
            last = min(curve[-1].round for curve in both)
            paired.append([[e for e in curve if e.round <= last] or curve[:1] for curve in both])
        found = {
            name: [of(own) - of(other) for own, other in paired] for name, of in MEASURES.items()
        }
        differences.append(
            {name: difference(each) for name, each in found.items()} if paired else None
        )
    return Row(*key, len(runs), finished, measures, tuple(ratios), tuple(differences), gist)


def ratio(curves: _Curves, base: str, base_curves: _Curves) -> Ratio:
    """How much sooner runs get to where those of the base end, by seed."""
    paired, logs = sorted(curves.keys() & base_curves.keys()), []
    for seed in paired:
        target = late_accuracy(base_curves[seed])
        own, others = rounds_to(curves[seed], target), rounds_to(base_curves[seed], target)
        if own is not None and others is not None:
            logs.append(math.log(others / own))
    value = math.exp(math.fsum(logs) / len(logs)) if logs else None
    return Ratio(base, value, len(logs), len(paired))


def _grouped(runs: Iterable[Run]) -> tuple[dict[_Key, dict[int, Run]], list[str]]:
    """The runs by task, setting and method, then by seed, and notes on those left out or to be taken with care."""
    groups: dict[_Key, dict[int, Run]] = {}
    notes: list[str] = []
    unfinished: list[str] = []
    for run in runs:
        header, evaluations = run.header, run.evaluations
        seeds = (
            groups.setdefault((header.task, header.setting, header.method), {})
            if evaluations
            else {}
        )
        if not evaluations:
            notes.append(f"{header.run}: left out, no evaluation yet")
        elif header.seed in seeds:
            notes.append(
                f"{header.run}: left out, {seeds[header.seed].header.run} has the same task, method and seed"
            )
        else:
            seeds[header.seed] = run
            reasons: Counter[str] = Counter()
            for line in run.of(Round):
                reasons.update(line.refused_reports)
            reports = sum(line.participations or len(line.participants) for line in run.of(Round))
            refused = reasons.total() - reasons["weight-cut"]
            if 2 * refused > reports:  # then its accuracy says little of its method
                most = max(reasons, key=lambda name: (name != "weight-cut", reasons[name]))
                told = f"{refused} of {reports} reports were refused, most of them for '{most}'"
                notes.append(f"{header.run}: {told}")
            if run.end is None:
                unfinished.append(f"{header.run} (round {evaluations[-1].round})")
    if unfinished:
        notes.append(f"not finished, counted as far as they got: {', '.join(unfinished)}")
    return groups, notes
