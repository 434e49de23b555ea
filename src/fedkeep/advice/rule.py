"""The rule by which `fedkeep advise` recommends a method; docs/own-data.md states it in words.

A method is recommended over FIFO only where it is shown to be better by more than one point of
accuracy. Differences are paired by seed and judged at fixed numbers of seeds (`LOOKS`). The error
probability of 5 % is divided evenly among these looks and among the candidates (Bonferroni), so
that the probability of recommending any method whose true lead is at most a point stays below 5 %,
however many methods are tried and whenever the trial ends.

References
----------
Jennison and Turnbull, Group sequential methods, 2000, section 2; Dunn, Multiple comparisons among
means, 1961.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedkeep.records.measures import LEVEL, MOST_SEEDS, interval, quantile

LOOKS = (3, 5, 8, 12, 16)
"""Numbers of seeds after which methods are judged."""
ERROR = 0.05
"""Probability of a false recommendation, at most."""
MARGIN = LEVEL
"""One point: a smaller lead is no reason for a more elaborate method."""
Finals = Mapping[str, Mapping[int, float]]
"""Final accuracies by method and seed."""


@dataclass(frozen=True)
class Lead:
    """A method's lead over another, with the bounds that the rule uses."""

    mean: float
    low: float
    high: float
    seeds: int
    more_seeds: int | None
    """Seeds that would place it on one side of the margin if it stayed as it is; None: too many."""

    @property
    def is_better(self) -> bool:
        """Whether it is shown to be more than the margin."""
        return self.low > MARGIN

    @property
    def is_settled(self) -> bool:
        """Whether it is shown to be more, or no more, than the margin."""
        return self.is_better or self.high <= MARGIN


def lead(finals: Finals, method: str, other: str, candidates: int) -> Lead | None:
    """Return a method's lead at the last look that both have reached; None before the first.

    Parameters
    ----------
    finals : mapping
        Final accuracies by method and seed.
    method, other : str
        The methods to compare, seed by seed.
    candidates : int
        How many methods may be recommended, which the error probability is divided by.

    Examples
    --------
    >>> found = lead({"ode": {0: .75, 1: .76, 2: .74}, "fifo": {0: .60, 1: .61, 2: .60}}, "ode",
    ...              "fifo", candidates=5)
    >>> round(found.mean, 3), round(found.low, 3), found.is_better
    (0.147, 0.094, True)
    """
    own, others = finals.get(method, {}), finals.get(other, {})
    paired = [own[seed] - others[seed] for seed in sorted(own.keys() & others.keys())]
    reached = [look for look in LOOKS if look <= len(paired)]
    if not reached:
        return None
    seeds = reached[-1]
    used = paired[:seeds]
    mean, deviation = math.fsum(used) / seeds, statistics.stdev(used)
    half = _half_width(deviation, seeds, candidates)
    more = next(
        (
            n
            for n in range(seeds + 1, MOST_SEEDS + 1)
            if _half_width(deviation, n, candidates) < abs(mean - MARGIN)
        ),
        None,
    )
    return Lead(mean, mean - half, mean + half, seeds, more)


def _half_width(deviation: float, seeds: int, candidates: int) -> float:
    tail = ERROR / len(LOOKS) / candidates
    return quantile(1 - 2 * tail, seeds - 1) * deviation / math.sqrt(seeds)


def recommend(finals: Finals, candidates: Sequence[str]) -> str:
    """Return the method to use.

    Parameters
    ----------
    finals : mapping
        Final accuracies by method and seed.
    candidates : sequence of str
        From the simplest to the most elaborate; the first is recommended unless another one is
        shown to be better.

    Returns
    -------
    str
        Of the methods shown to be better than the first by more than the margin, the simplest one
        that the best of them is shown not to exceed by more than the margin.
    """
    base, *others = candidates
    leads = {method: lead(finals, method, base, len(others)) for method in others}
    shown = [method for method in others if (found := leads[method]) and found.is_better]
    if not shown:
        return base
    best = best_of(finals, shown)
    for method in shown:
        behind = lead(finals, best, method, len(others))
        if behind is not None and behind.high <= MARGIN:
            return method
    return best


def best_of(finals: Finals, methods: Sequence[str]) -> str:
    """Return the method with the best mean over the seeds that all have finished."""
    common = set.intersection(*(set(finals.get(method, {})) for method in methods))
    return max(methods, key=lambda method: sum(finals[method][seed] for seed in common))


def open_methods(finals: Finals, candidates: Sequence[str]) -> list[str]:
    """Return the candidates that more seeds may still make the recommended one.

    A method is given up where the plain 95 % interval of its lead excludes a point; that can miss
    a better method, but cannot recommend a worse one.
    """
    chosen = recommend(finals, candidates)
    found = []
    for method in candidates[1:]:
        stands = lead(finals, method, candidates[0], len(candidates) - 1)
        settled = stands is not None and stands.is_settled
        if method == chosen or (chosen == candidates[0] and settled):
            continue
        own, others = finals.get(method, {}), finals.get(chosen, {})
        paired = [own[seed] - others[seed] for seed in own.keys() & others.keys()]
        half = interval(paired)
        if half is None or math.fsum(paired) / len(paired) + half > MARGIN:
            found.append(method)
    return found
