"""How often a device sees each region in the long run, and how many slots each should have for it."""

from typing import Literal, TypeAlias

import numpy as np

from fedkeep.core.seeds import uniform_keys
from fedkeep.core.types import FloatArray, IntArray, State

Targets: TypeAlias = Literal["even", "root", "share"]
"""How a device divides its slots where no plan does: alike, by the root of each region's share, or by the share itself.

With the root, rare regions are there and frequent ones have samples enough.
"""
_POWER = {"even": 0.0, "root": 0.5, "share": 1.0}


class Shares:
    """Counts arrivals by region, slowly forgetting; what follows from it does not depend on how a stream is cut.

    >>> shares = Shares(3, seed=1)
    >>> shares.see(np.array([0, 0, 0, 0, 2]))
    >>> shares.values().tolist()
    [0.8, 0.0, 0.2]
    >>> shares.divide(6).tolist()
    [4, 0, 2]
    """

    def __init__(self, regions: int, targets: Targets = "root", forgetting: float = 0.99, seed: int = 0) -> None:
        self._power, self._forgetting, self._seed = _POWER[targets], forgetting, seed
        self._counts = np.zeros(regions)
        self._arrivals = 0
        self.targets: IntArray = np.zeros(regions, dtype=np.int64)
        """Slots as they were last divided."""

    def see(self, regions: IntArray) -> None:
        self._counts += np.bincount(regions, minlength=len(self._counts))
        self._arrivals += len(regions)

    def age(self) -> None:
        """A participation has passed: what came before counts a little less."""
        self._counts *= self._forgetting

    def values(self) -> FloatArray:
        """Each region's share of the stream, (Y,); zeros before anything has come."""
        total = self._counts.sum()
        return self._counts / total if total > 0 else self._counts.copy()

    def stretches(self, regions: IntArray) -> list[tuple[int, int, bool]]:
        """Ranges of a batch, and whether targets change at the first sample of each.

        They do at a region never seen before, and whenever twice as many samples have come as at the last such time.
        """
        found, first = np.unique(regions, return_index=True)
        changes = set(first[self._counts[found] == 0].tolist())
        doubled = 1 << self._arrivals.bit_length()
        while doubled <= self._arrivals + len(regions):
            changes.add(doubled - self._arrivals - 1)
            doubled *= 2
        starts = sorted({0, *changes})
        return [(a, b, a in changes) for a, b in zip(starts, [*starts[1:], len(regions)], strict=True)]

    def divide(self, capacity: int) -> IntArray:
        """Whole slots for each region, `capacity` in all; where a region's due is a fraction, it takes turns.

        The turns are a systematic draw by the number of arrivals: over time every region has its due.
        """
        due = np.where(self._counts > 0, self.values() ** self._power, 0.0)
        if not due.any():
            return self.targets
        upto = capacity * np.cumsum(due) / due.sum()
        upto[-1] = capacity
        turn = uniform_keys(self._seed, np.array([self._arrivals]))[0]
        self.targets = np.diff(np.floor(upto + turn), prepend=0.0).astype(np.int64)
        return self.targets

    def snapshot(self) -> State:
        return {"counts": self._counts.copy(), "arrivals": np.array(self._arrivals), "targets": self.targets}

    def restore(self, state: State) -> None:
        self._counts = np.array(state["counts"], dtype=np.float64)
        self._arrivals, self.targets = int(state["arrivals"]), np.array(state["targets"], dtype=np.int64)
