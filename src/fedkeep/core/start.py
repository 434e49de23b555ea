"""What a device keeps before the server has told it what to keep."""

from __future__ import annotations

import numpy as np

from fedkeep.core.types import IntArray, State


class BalancedStart:
    """Slots divided evenly among the regions seen so far, in the order of their first sightings."""

    def __init__(self, regions: int) -> None:
        self._regions = regions
        self._seen: list[int] = []

    def between_sightings(self, regions: IntArray) -> list[tuple[int, int]]:
        """Ranges of a batch, each but the first beginning with the first sample of a region never seen before."""
        found, first = np.unique(regions, return_index=True)
        new = ~np.isin(found, self._seen)
        cuts = sorted({0, *first[new].tolist()})
        return list(zip(cuts, [*cuts[1:], len(regions)], strict=True))

    def see(self, regions: IntArray) -> None:
        self._seen += [int(r) for r in regions[:1] if r not in self._seen]

    def quotas(self, capacity: int) -> IntArray:
        """An even split; what is left over goes to the regions seen first."""
        quotas = np.zeros(self._regions, dtype=np.int64)
        if self._seen:
            share, rest = divmod(capacity, len(self._seen))
            quotas[self._seen] = share
            quotas[self._seen[:rest]] += 1
        return quotas

    def snapshot(self) -> State:
        return {"seen": np.array(self._seen, dtype=np.int64)}

    def restore(self, state: State) -> None:
        self._seen = state["seen"].tolist()
