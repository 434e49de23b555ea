"""What one run's curve comes to in one number, and what such numbers say over seeds, by Student's t."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedkeep.core.plan import Plan
from fedkeep.records.lines import Evaluation, GistLine, PlanLine

LISTED = 50
"""Devices that lines list: the first ones, the same in all lines."""
LAST = 5
"""Evaluations that a late accuracy is the mean of."""
LEVEL = 0.01
"""Differences of accuracy that count as none: one point."""
MOST_SEEDS = 200
"""More seeds than this nobody is advised to run."""


@dataclass(frozen=True)
class MeanOverSeeds:
    """A mean over seeds."""

    mean: float
    half_width: float | None
    """Of its 95 % interval by Student's t; None of a single seed."""
    seeds: int


@dataclass(frozen=True)
class Difference(MeanOverSeeds):
    """By how much a method is ahead of another, over the seeds both ran: they saw the same data in the same order."""

    verdict: str
    """ "ahead" or "behind" where the interval leaves 0 out, "level" where it stays within a point, or "undecided"."""
    seeds_to_decide: int | None
    """How many seeds would decide it if they differed as these do; None where it is decided, or none would."""


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
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return quantile(0.95, n - 1) * math.sqrt(variance / n)


def estimate(values: Sequence[float]) -> MeanOverSeeds:
    """The mean of one value a seed, and its interval."""
    return MeanOverSeeds(math.fsum(values) / len(values), interval(values), len(values))


def difference(values: Sequence[float]) -> Difference:
    """What one difference a seed says.

    >>> difference([0.030, 0.021, 0.027]).verdict
    'ahead'
    >>> found = difference([0.030, -0.021, 0.027])
    >>> found.verdict, found.seeds_to_decide
    ('undecided', 25)
    """
    found = estimate(values)
    verdict = _verdict(found)
    more = _seeds_to_decide(found) if verdict == "undecided" else None
    return Difference(found.mean, found.half_width, found.seeds, verdict, more)


def _verdict(found: MeanOverSeeds) -> str:
    if found.half_width is None:
        return "undecided"
    if abs(found.mean) > found.half_width:
        return "ahead" if found.mean > 0 else "behind"
    return "level" if abs(found.mean) + found.half_width <= LEVEL else "undecided"


def _seeds_to_decide(found: MeanOverSeeds) -> int | None:
    if found.half_width is None:
        return None
    deviation = found.half_width * math.sqrt(found.seeds) / quantile(0.95, found.seeds - 1)
    reach = max(abs(found.mean), LEVEL - abs(found.mean))
    more = range(found.seeds + 1, MOST_SEEDS + 1)
    return next((n for n in more if quantile(0.95, n - 1) * deviation / math.sqrt(n) < reach), None)


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


def area(evaluations: Sequence[Evaluation]) -> float:
    """The mean accuracy over all rounds: the area under the curve, by the rounds it spans."""
    pairs = list(pairwise(evaluations))
    rounds = sum(b.round - a.round for a, b in pairs)
    if not rounds:
        return final_accuracy(evaluations)
    halves = (((a.accuracy or 0.0) + (b.accuracy or 0.0)) / 2 * (b.round - a.round) for a, b in pairs)
    return math.fsum(halves) / rounds


MEASURES: Mapping[str, Callable[[Sequence[Evaluation]], float]] = {
    "final": final_accuracy,
    "best": best_accuracy,
    "area": area,
    "late": late_accuracy,
}
"""What a curve may be judged by; each takes one evaluation or more."""
GIST = ("trust", "likeness", "worth", "reach")
"""What is told of a gist."""


def gist_line(round_: int, figures: Sequence[Sequence[float]]) -> GistLine:
    """What the gists of some participations did: the mean of each figure, which stand in the order of `GIST`."""
    means = dict(zip(GIST, np.mean(figures, axis=0).tolist(), strict=True))
    return GistLine(round=round_, participations=len(figures), **means)


def plan_line(round_: int, plan: Plan, clients_per_label: int | None, regions: Iterable[str] = ()) -> PlanLine:
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
    sums = {name: math.fsum(getattr(line, name) * line.participations for line in lines) for name in GIST}
    means = {name: total / max(count, 1) for name, total in sums.items()}
    # A ratio: where the stored samples' gradient all but vanishes, one line would be all that a mean tells of.
    means["reach"] = statistics.median(line.reach for line in lines)
    return GistLine(round=lines[-1].round, participations=count, **means)


def _trained(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    return [e for e in evaluations if e.round > 0] or evaluations
