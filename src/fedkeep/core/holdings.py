"""Which device holds which label: the set S of Eq. 10, built label by label with whole columns at a time."""

from collections.abc import Iterator

import numpy as np

from fedkeep.core.fleet import Velocities
from fedkeep.core.types import AnyArray, BoolArray, IntArray

_ROWS = 1 << 12
"""Devices handled at once."""
_COLUMNS = 16
"""Labels whose rates are copied out at once: a cache line of float32, since single columns are slow to read."""
_CHAINED_CELLS = 10**9
"""Cells of V that chains of exchanges may look at per repair: bounds the time spent on fleets beyond repair."""


class Holdings:
    """Labels held by devices, with the room each device has left; every step keeps within the limits."""

    def __init__(self, velocity: Velocities, limits: IntArray, held: BoolArray | None = None) -> None:
        self.velocity = velocity
        self.held: BoolArray = np.zeros(velocity.shape, dtype=bool) if held is None else held
        self.room: IntArray = limits - self.held.sum(axis=1)
        self.holders: IntArray = self.held.sum(axis=0)

    def grant(self, order: IntArray, least: IntArray) -> None:
        """Gives each label in turn to its fastest owners with room until it has its `least` (the greedy's step 2)."""
        short = order[self.holders[order] < least[order]]
        for start in range(0, len(short), _COLUMNS):
            labels = short[start : start + _COLUMNS]
            columns = np.empty((len(labels), len(self.velocity)), dtype=self.velocity.dtype)
            for row in range(0, len(self.velocity), _ROWS):
                columns[:, row : row + _ROWS] = self.velocity[row : row + _ROWS, labels].T
            for label, rates in zip(labels.tolist(), columns, strict=True):
                owners = np.flatnonzero((rates > 0) & (self.room > 0))
                owners = owners[~self.held[owners, label]]
                given = owners[fastest(rates[owners], int(least[label] - self.holders[label]))]
                self.held[given, label] = True
                self.room[given] -= 1
                self.holders[label] += len(given)

    def repair(self, least: IntArray) -> None:
        """Finds holders for labels under `least` where room alone did not: others hand labels on, none falls short."""
        for label in np.argsort(self.holders, kind="stable").tolist():
            self._exchange(label, least)
        chains = iter(range(max(1, _CHAINED_CELLS // max(1, self.held.size * len(self.holders)))))
        for label in np.flatnonzero(self.holders < least).tolist():
            while self.holders[label] < least[label] and next(chains, None) is not None:
                if not self._chain(label, least):
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
        for other in np.argsort(least - self.holders, kind="stable").tolist():
            missing, spare = least[label] - self.holders[label], self.holders[other] - least[other]
            if missing <= 0 or spare <= 0:
                return
            self._hand_on(other, label, int(min(missing, spare)))

    def _chain(self, label: int, least: IntArray) -> bool:
        """Finds the label more holders along the shortest chain of exchanges; says whether there is one."""
        came_from = {label: label}
        queue = [label]
        for current in queue:
            owners = (self.velocity[:, current] > 0) & ~self.held[:, current]
            free = int((owners & (self.room > 0)).sum())
            spare = 0 if current == label else int(self.holders[current] - least[current])
            if free or spare > 0:
                missing = int(least[label] - self.holders[label])
                self._pull(current, came_from, most=min(missing, free or spare), grant=free > 0)
                return True
            for other in np.flatnonzero(self.held[owners].any(axis=0)).tolist():
                if other not in came_from:
                    came_from[other] = current
                    queue.append(other)
        return False

    def _pull(self, end: int, came_from: dict[int, int], *, most: int, grant: bool) -> None:
        """Moves as many holders along a chain as each of its links allows."""
        links, last = [], end
        while came_from[last] != last:
            links.append((last, came_from[last]))
            last = came_from[last]
        amount = min([most, *(len(self._swappers(dropped, taken)) for dropped, taken in links)])
        if grant:
            self.grant(np.array([end]), self.holders + amount)
        for dropped, taken in links:
            self._hand_on(dropped, taken, amount)

    def _hand_on(self, dropped: int, taken: int, count: int) -> None:
        """The fastest of those that can take one label for another do."""
        swappers = self._swappers(dropped, taken)
        self.swap(swappers[fastest(self.velocity[swappers, taken], count)], dropped, taken)

    def _swappers(self, dropped: int, taken: int) -> IntArray:
        """Devices that hold one label and could hold the other in its place."""
        return np.flatnonzero(self.held[:, dropped] & ~self.held[:, taken] & (self.velocity[:, taken] > 0))


def fastest(rates: AnyArray, count: int) -> IntArray:
    """The positions of the `count` largest rates; among equals the first."""
    if count >= len(rates):
        return np.arange(len(rates))
    threshold = np.partition(rates, len(rates) - count)[len(rates) - count]
    above = np.flatnonzero(rates > threshold)
    level = np.flatnonzero(rates == threshold)[: count - len(above)]
    return np.concatenate([above, level])


def largest_per_row(values: AnyArray, counts: IntArray) -> BoolArray:
    """Marks the counts[i] largest positive values of each row i; among equals the first."""
    marked = counts[:, None] >= np.count_nonzero(values > 0, axis=1)[:, None]
    chosen: BoolArray = marked & (values > 0)
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


def row_chunks(rows: IntArray) -> Iterator[IntArray]:
    """The rows in portions, so that temporary arrays stay small beside a fleet of millions."""
    for start in range(0, len(rows), _ROWS):
        yield rows[start : start + _ROWS]
