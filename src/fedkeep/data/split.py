"""Cuts each device's samples into training and test, and shares whole numbers out by weight."""

from __future__ import annotations

import numpy as np

from fedkeep.core.seeds import child_seed, uniform_keys
from fedkeep.core.types import FloatArray, IntArray
from fedkeep.data.federation import Ownership


def apportion(total: int, weights: FloatArray, minimum: int = 0) -> IntArray:
    """`total` shared out in proportion to `weights` by largest remainders, each share at least `minimum`."""
    free = total - minimum * len(weights)
    if free < 0:
        raise ValueError(f"{total} cannot be shared among {len(weights)} with at least {minimum} each")
    exact = free * (weights / weights.sum())
    shares = np.floor(exact).astype(np.int64)
    largest = np.argsort(shares - exact, kind="stable")[: free - int(shares.sum())]
    shares[largest] += 1
    shared: IntArray = shares + minimum
    return shared


def hold_out(members: Ownership, fraction: float, seed: int) -> tuple[Ownership, Ownership]:
    """Training and test parts of every device, the test part drawn at random inside the device.

    A device with a single sample keeps it for training; one with more gives at least one to the test.
    """
    sizes = members.sizes
    tests = np.clip(np.round(fraction * sizes).astype(np.int64), np.minimum(1, sizes - 1), np.maximum(sizes - 1, 0))
    keys = uniform_keys(child_seed(seed, "hold-out"), members.indices)
    order = np.lexsort((keys, members.owners))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - np.repeat(members.offsets[:-1], sizes)
    held = rank < np.repeat(tests, sizes)
    return members.where(~held), members.where(held)
