"""How many slots each held label gets (step 3 of the greedy), by rules that go by name in `[coordinator]`."""

from collections.abc import Callable

import numpy as np

from fedkeep.core.fleet import Fleet
from fedkeep.core.holdings import largest_per_row, row_chunks
from fedkeep.core.types import AnyArray, BoolArray, FloatArray, IntArray


def even(fleet: Fleet, held: BoolArray) -> AnyArray:
    """The slots split evenly, the remainder to the device's most frequent labels: the paper's rule."""
    quotas = _quota_table(fleet)
    for rows in row_chunks(np.flatnonzero(held.any(axis=1))):
        share, rest = np.divmod(fleet.capacities[rows], held[rows].sum(axis=1))
        extra = largest_per_row(np.where(held[rows], fleet.velocities[rows], 0), rest)
        quotas[rows] = held[rows] * share.astype(quotas.dtype)[:, None] + extra
    return quotas


def frequent(fleet: Fleet, held: BoolArray) -> AnyArray:
    """One slot for each label and the rest for the most frequent: the most that (9a) can reach once S is fixed.

    It leaves (9d) to the label weights, as `even` does.
    """
    quotas = _quota_table(fleet)
    for rows in row_chunks(np.flatnonzero(held.any(axis=1))):
        quotas[rows] = held[rows]
        best = np.where(held[rows], fleet.velocities[rows], -1).argmax(axis=1)
        quotas[rows, best] += (fleet.capacities[rows] - held[rows].sum(axis=1)).astype(quotas.dtype)
    return quotas


QUANTITIES: dict[str, Callable[[Fleet, BoolArray], AnyArray]] = {"even": even, "frequent": frequent}
"""Each gives every label held, S of Eq. 10 as a (C, Y) table, at least one slot and uses up each device's capacity."""


def _quota_table(fleet: Fleet) -> AnyArray:
    """An empty D, in the smallest integers that hold the largest capacity."""
    largest = int(fleet.capacities.max(initial=0))
    return np.zeros(fleet.velocities.shape, dtype=np.int16 if largest < 2**15 else np.int64)


def apportion(total: int, weights: FloatArray, minimum: int = 0) -> IntArray:
    """`total` shared out in proportion to `weights` by largest remainders, each share at least `minimum`.

    >>> apportion(10, np.array([0.5, 0.3, 0.2])).tolist(), apportion(4, np.array([9.0, 1.0]), minimum=1).tolist()
    ([5, 3, 2], [3, 1])
    """
    free = total - minimum * len(weights)
    if free < 0:
        raise ValueError(f"{total} cannot be shared among {len(weights)} with at least {minimum} each")
    exact = free * (weights / weights.sum())
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: free - int(shares.sum())]] += 1
    return np.asarray(shares + minimum)
