"""Which device holds which label: the set S of Eq. 10, built label by label with whole columns at a time."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.fleet import Velocities
from fedkeep.core.types import AnyArray, IntArray

_ROWS = 1 << 12
"""Devices handled at once."""
_COLUMNS = 16
"""Labels whose rates are copied out at once: a cache line of float32, since single columns are slow to read."""
_CHAINED_CELLS = 10**9
"""Cells of V that chains of exchanges may look at per repair: bounds the time spent on fleets beyond repair."""


class Holdings:
    """Labels held by devices, with the room each device has left; every step keeps within the limits."""

    def __init__(self, velocity: Velocities, limits: IntArray, held: NDArray[np.bool_] | None = None) -> None:
        self.velocity = velocity
        if held is None:
            self.held: NDArray[np.bool_] = np.zeros(velocity.shape, dtype=bool)
            self.room, self.holders = limits.copy(), np.zeros(velocity.shape[1], dtype=np.int64)
        else:
            self.held = held.copy()
            self.room, self.holders = limits - held.sum(axis=1), held.sum(axis=0)

    def grant(self, order: IntArray, least: IntArray) -> None:
        """Gives each label in turn to its fastest owners with room until it has its `least` (the greedy's step 2)."""
        short = order[self.holders[order] < least[order]]
        for start in range(0, len(short), _COLUMNS):
            labels = short[start : start + _COLUMNS]
            for label, rates in zip(labels, _columns(self.velocity, labels), strict=True):
                owners = np.flatnonzero((rates > 0) & (self.room > 0))
                owners = owners[~self.held[owners, label]]
                missing = int(least[label] - self.holders[label])
                self._give(owners[fastest(rates[owners], missing)], int(label))

    def repair(self, least: IntArray) -> None:
        """Finds holders for labels under `least` where room alone did not: others hand labels on, none falls short."""
        for label in np.argsort(self.holders, kind="stable"):
            self._exchange(int(label), least)
        chains = iter(range(max(1, _CHAINED_CELLS // max(1, self.held.size * len(self.holders)))))
        for label in np.flatnonzero(self.holders < least):
            while self.holders[label] < least[label] and next(chains, None) is not None:
                if not self._chain(int(label), least):
                    break

    def fill(self) -> None:
        """Gives devices with room their fastest labels, so that none that sees data goes without (step 2, end)."""
        for rows in row_chunks(np.flatnonzero(self.room > 0)):
            wanted = np.where(self.held[rows], 0, self.velocity[rows])
            self.held[rows] |= largest_per_row(wanted, self.room[rows])
            self.room[rows] = 0
        self.holders = self.held.sum(axis=0)

    def swap(self, devices: IntArray, dropped: int, taken: int) -> None:
        """Lets these devices hold one label in place of another."""
        self.held[devices, dropped] = False
        self.held[devices, taken] = True
        self.holders[dropped] -= len(devices)
        self.holders[taken] += len(devices)

    def _exchange(self, label: int, least: IntArray) -> None:
        """Lets fast owners swap a label that has holders to spare for one that lacks them."""
        for other in np.argsort(least - self.holders, kind="stable"):
            missing = least[label] - self.holders[label]
            spare = self.holders[other] - least[other]
            if missing <= 0 or spare <= 0:
                return
            swappers = self._swappers(label, int(other))
            chosen = swappers[fastest(self.velocity[swappers, label], int(min(missing, spare)))]
            self.swap(chosen, int(other), label)

    def _chain(self, label: int, least: IntArray) -> bool:
        """Finds the label more holders along the shortest chain of exchanges; says whether there is one."""
        came_from = {label: label}
        queue = [label]
        for current in queue:
            free = self._count_free(current)
            spare = 0 if current == label else int(self.holders[current] - least[current])
            if free or spare > 0:
                self._pull(current, came_from, free=free, spare=spare, missing=int(least[label] - self.holders[label]))
                return True
            for other in self._reachable(current):
                if other not in came_from:
                    came_from[other] = current
                    queue.append(other)
        return False

    def _pull(self, last: int, came_from: dict[int, int], *, free: int, spare: int, missing: int) -> None:
        """Moves as many holders along a chain as each of its links allows."""
        links = []
        while came_from[last] != last:
            links.append((last, came_from[last]))
            last = came_from[last]
        allowed = [len(self._swappers(taken, dropped)) for dropped, taken in links]
        amount = min([missing, free or spare, *allowed])
        if free:
            end = links[0][0] if links else last
            self.grant(np.array([end]), self.holders + amount)
        for dropped, taken in links:
            swappers = self._swappers(taken, dropped)
            self.swap(swappers[fastest(self.velocity[swappers, taken], amount)], dropped, taken)

    def _reachable(self, label: int) -> list[int]:
        """The labels that some owner of `label` could hand on for it."""
        owners = (self.velocity[:, label] > 0) & ~self.held[:, label]
        return [int(other) for other in np.flatnonzero(self.held[owners].any(axis=0))]

    def _count_free(self, label: int) -> int:
        """How many owners of the label do not hold it and may hold one label more."""
        return int(((self.velocity[:, label] > 0) & (self.room > 0) & ~self.held[:, label]).sum())

    def _swappers(self, label: int, other: int) -> IntArray:
        """Devices that hold `other` and could hold `label` in its place."""
        return np.flatnonzero(self.held[:, other] & ~self.held[:, label] & (self.velocity[:, label] > 0))

    def _give(self, devices: IntArray, label: int) -> None:
        self.held[devices, label] = True
        self.room[devices] -= 1
        self.holders[label] += len(devices)


def fastest(rates: AnyArray, count: int) -> IntArray:
    """The positions of the `count` largest rates; among equals the first."""
    if count >= len(rates):
        return np.arange(len(rates))
    threshold = np.partition(rates, len(rates) - count)[len(rates) - count]
    above = np.flatnonzero(rates > threshold)
    level = np.flatnonzero(rates == threshold)[: count - len(above)]
    return np.concatenate([above, level])


def largest_per_row(values: AnyArray, counts: IntArray) -> NDArray[np.bool_]:
    """Marks the counts[i] largest positive values of each row i; among equals the first."""
    marked = counts[:, None] >= np.count_nonzero(values > 0, axis=1)[:, None]
    chosen: NDArray[np.bool_] = marked & (values > 0)
    rows = np.flatnonzero(~marked[:, 0] & (counts > 0))
    left, values = counts[rows], values[rows]
    while len(rows):
        best = values.argmax(axis=1)
        chosen[rows, best] = True
        values[np.arange(len(rows)), best] = 0
        left = left - 1
        going = left > 0
        rows, left, values = (rows, left, values) if going.all() else (rows[going], left[going], values[going])
    return chosen


def _columns(velocity: Velocities, labels: IntArray) -> Velocities:
    """The rates of these labels, one row each."""
    rates = np.empty((len(labels), len(velocity)), dtype=velocity.dtype)
    for start in range(0, len(velocity), _ROWS):
        rates[:, start : start + _ROWS] = velocity[start : start + _ROWS, labels].T
    return rates


def row_chunks(rows: IntArray) -> Iterator[IntArray]:
    """The rows in portions, so that temporary arrays stay small beside a fleet of millions."""
    for start in range(0, len(rows), _ROWS):
        yield rows[start : start + _ROWS]
