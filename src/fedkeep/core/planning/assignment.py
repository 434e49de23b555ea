"""Which device holds which label: the set S of Eq. 10, label by label, whole columns at a time.

Then improved by local search: devices exchange labels in short cycles while the objective (9a)
grows. An exchange "a -> b" lets one device drop label a and take b, so that a loses a holder and b
gains one. Round a cycle of labels nobody loses. A cycle may also pass through one of two pools, at
which a label ends up with a holder more and the next with one less: either that one has more than
wanted, or it is no more short than the first was.

At last every label held gets its slots, by a rule that goes by name in `[coordinator]` (step 3 of
the greedy).
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedkeep.core.planning.profiles import FleetProfiles, count_columns
from fedkeep.core.types import AnyArray, BoolArray, FloatArray, IntArray

_ROWS = 1 << 12
"""Devices handled at once."""
_COLUMNS = 16
"""Labels whose rates are copied out at once: a cache line of float32, since single columns are slow
to read."""
_CHAINED_CELLS = 10**9
"""Cells of V that chains of exchanges may look at per repair: bounds the time spent on fleets
beyond repair."""
_NEVER = -np.inf
_CANDIDATES = 512
"""Cycles looked at per step of the local search; most often the first ones are taken."""


class LabelHolders:
    """Labels held by devices, with the room each device has left.

    Every step keeps within the limits.
    """

    def __init__(self, velocity: AnyArray, limits: IntArray, held: BoolArray | None = None) -> None:
        self.velocity = velocity
        self.held: BoolArray = np.zeros(velocity.shape, dtype=bool) if held is None else held
        nothing = np.zeros(velocity.shape[1], dtype=np.int64)
        self.room: IntArray = limits.copy() if held is None else limits - held.sum(axis=1)
        self.holders: IntArray = nothing if held is None else held.sum(axis=0)

    def grant(self, order: IntArray, least: IntArray) -> None:
        """Give each label in turn to its fastest owners with room (the greedy's step 2).

        Each gets holders until it has its `least`.
        """
        short = order[self.holders[order] < least[order]]
        for start in range(0, len(short), _COLUMNS):
            labels = short[start : start + _COLUMNS]
            columns = np.empty((len(labels), len(self.velocity)), dtype=self.velocity.dtype)
            for row in range(0, len(self.velocity), _ROWS):
                columns[:, row : row + _ROWS] = (
                    self.velocity[row : row + _ROWS].take(labels, axis=1).T
                )
            for label, rates in zip(labels.tolist(), columns, strict=True):
                owners = np.flatnonzero((rates > 0) & (self.room > 0))
                owners = owners[~self.held[owners, label]]
                given = owners[fastest(rates[owners], int(least[label] - self.holders[label]))]
                self.held[given, label] = True
                self.room[given] -= 1
                self.holders[label] += len(given)

    def repair(self, least: IntArray) -> None:
        """Find holders for labels under `least` where room alone did not.

        Others hand labels on, none falls short.
        """
        for label in np.argsort(self.holders, kind="stable").tolist():
            for other in np.argsort(least - self.holders, kind="stable").tolist():
                missing, spare = (
                    least[label] - self.holders[label],
                    self.holders[other] - least[other],
                )
                if missing <= 0 or spare <= 0:
                    break
                self._hand_on(other, label, int(min(missing, spare)))
        chains = iter(range(max(1, _CHAINED_CELLS // max(1, self.held.size * len(self.holders)))))
        for label in np.flatnonzero(self.holders < least).tolist():
            while (
                self.holders[label] < least[label]
                and next(chains, None) is not None
                and self._chain(label, least)
            ):
                pass

    def fill(self) -> None:
        """Give devices with room their fastest labels (step 2, end).

        None that sees data goes without.
        """
        for rows in row_chunks(np.flatnonzero(self.room > 0)):
            wanted = np.where(self.held[rows], 0, self.velocity[rows])
            taken = largest_per_row(wanted, self.room[rows])
            self.held[rows] |= taken
            self.holders += count_columns(taken)
            self.room[rows] = 0

    def swap(self, devices: IntArray, dropped: int, taken: int) -> None:
        """Lets these devices hold one label in place of another."""
        self.held[devices, dropped] = False
        self.held[devices, taken] = True
        self.holders[dropped] -= len(devices)
        self.holders[taken] += len(devices)

    def _chain(self, label: int, least: IntArray) -> bool:
        """Find the label as many more holders as the shortest chain of exchanges allows.

        Says whether there is one.
        """
        came_from = {label: label}
        for current in (queue := [label]):
            owners = (self.velocity[:, current] > 0) & ~self.held[:, current]
            free = int((owners & (self.room > 0)).sum())
            spare = 0 if current == label else int(self.holders[current] - least[current])
            if free or spare > 0:
                break
            for other in np.flatnonzero(self.held[owners].any(axis=0)).tolist():
                if other not in came_from:
                    came_from[other] = current
                    queue.append(other)
        else:
            return False
        links, last = [], current
        while came_from[last] != last:
            links.append((last, came_from[last]))
            last = came_from[last]
        most = min(int(least[label] - self.holders[label]), free or spare)
        amount = min([most, *(len(self._swappers(dropped, taken)) for dropped, taken in links)])
        if free:
            self.grant(np.array([current]), self.holders + amount)
        for dropped, taken in links:
            self._hand_on(dropped, taken, amount)
        return True

    def _hand_on(self, dropped: int, taken: int, count: int) -> None:
        """Let the fastest of those that can take one label for another do so."""
        swappers = self._swappers(dropped, taken)
        self.swap(swappers[fastest(self.velocity[swappers, taken], count)], dropped, taken)

    def _swappers(self, dropped: int, taken: int) -> IntArray:
        """Devices that hold one label and could hold the other in its place."""
        return np.flatnonzero(
            self.held[:, dropped] & ~self.held[:, taken] & (self.velocity[:, taken] > 0)
        )


def fastest(rates: AnyArray, count: int) -> IntArray:
    """Return the positions of the `count` largest rates; among equals the first."""
    if count >= len(rates):
        return np.arange(len(rates))
    threshold = np.partition(rates, len(rates) - count)[len(rates) - count]
    above = np.flatnonzero(rates > threshold)
    level = np.flatnonzero(rates == threshold)[: count - len(above)]
    return np.concatenate([above, level])


def largest_per_row(values: AnyArray, counts: IntArray) -> BoolArray:
    """Mark the counts[i] largest positive values of each row i; among equals the first."""
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
        rows, left, values = (
            (rows, left, values) if going.all() else (rows[going], left[going], values[going])
        )
    return chosen


def row_chunks(rows: IntArray) -> Iterator[IntArray | slice]:
    """Split the rows in portions, so that temporary arrays stay small for large fleets."""
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        first, last = int(part[0]), int(part[-1])
        # Rows side by side are taken as they are, without a copy.
        yield slice(first, last + 1) if last - first + 1 == len(part) else part


def improve(
    holdings: LabelHolders, capacities: IntArray, stages: Sequence[IntArray], *, concentrated: bool
) -> None:
    """Make exchanges until none of the cycles tried adds to the objective.

    No label comes to have fewer holders than the first of the `stages` asks for, nor do all
    together come to lack more of what the last one asks for. `concentrated` says that all slots but
    one per label go to a device's fastest label; else they are split evenly. In a step, cycles
    share neither labels nor devices, so that gains add up.
    """
    labels_of_step: set[int] = {-1}
    while labels_of_step:
        best, makers = _gains(holdings, capacities, stages, concentrated=concentrated)
        pools = {len(best) - 2, len(best) - 1}
        labels_of_step, devices_of_step = set(), set[int]()
        for cycle in _cycles(best):
            swaps = [
                pair
                for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True)
                if not pools & set(pair)
            ]
            labels = [label for label in cycle if label not in pools]
            devices = [int(makers[pair]) for pair in swaps]
            if len({*labels} - labels_of_step) < len(labels) or len(
                {*devices} - devices_of_step
            ) < len(devices):
                continue  # one of them is busy already, or comes twice
            labels_of_step.update(labels)
            devices_of_step.update(devices)
            for device, (dropped, taken) in zip(devices, swaps, strict=True):
                holdings.swap(np.array([device]), dropped, taken)


def _gains(
    holdings: LabelHolders, capacities: IntArray, stages: Sequence[IntArray], *, concentrated: bool
) -> tuple[FloatArray, IntArray]:
    """Find the best exchange for every two labels, (Y + 2, Y + 2), the last two being the pools.

    What it adds to the objective, and the device that makes it.
    """
    labels, holders = len(holdings.holders), holdings.holders
    best = np.full((labels + 2, labels + 2), _NEVER)
    makers = np.full((labels + 2, labels + 2), -1)
    for dropped in np.flatnonzero(holdings.held.any(axis=0)).tolist():
        rows = np.flatnonzero(holdings.held[:, dropped])
        rates, held = holdings.velocity[rows].astype(np.float64), holdings.held[rows]
        change = rates - rates[:, dropped, None]
        if concentrated:
            kept = np.where(held, rates, 0.0)
            top = kept.max(axis=1)
            kept[:, dropped] = 0.0
            spare = (capacities[rows] - held.sum(axis=1))[:, None]
            change += spare * (np.maximum(rates, kept.max(axis=1)[:, None]) - top[:, None])
        else:
            change *= (capacities[rows] / held.sum(axis=1))[:, None]
        gain = np.where(held | (rates == 0), _NEVER, change)
        winner = gain.argmax(axis=0)
        best[dropped, :labels] = gain[winner, np.arange(labels)]
        makers[dropped, :labels] = rows[winner]
    best[:labels, labels] = 0.0
    best[labels, :labels] = np.where(holders > stages[-1], 0.0, _NEVER)
    best[:labels, labels + 1] = np.where(holders < stages[-1], 0.0, _NEVER)
    best[labels + 1, :labels] = np.where(holders > stages[0], 0.0, _NEVER)
    return best, makers


def _cycles(best: FloatArray) -> Iterator[list[int]]:
    """Cycles of two, three or four labels with a positive gain, from the largest gain down."""
    through = best[:, :, None] + best[None, :, :]
    middle, twice = through.argmax(axis=1), through.max(axis=1)
    tables = (best + best.T, twice + best.T, twice + twice.T)
    floor = 1e-9 * np.abs(best[np.isfinite(best)]).max(initial=0.0)
    flat = np.concatenate([table.ravel() for table in tables])
    for position in np.argsort(-flat, kind="stable")[:_CANDIDATES]:
        if flat[position] <= floor:
            return
        kind, cell = divmod(int(position), best.size)
        first, last = divmod(cell, len(best))
        ahead = [int(middle[first, last])] if kind else []
        back = [int(middle[last, first])] if kind == 2 else []
        yield [first, *ahead, last, *back]


def even(fleet: FleetProfiles, held: BoolArray) -> AnyArray:
    """Split the slots evenly, the remainder to the device's most frequent labels.

    The paper's rule.
    """
    quotas = _quota_table(fleet)
    for rows in row_chunks(np.flatnonzero(held.any(axis=1))):
        share, rest = np.divmod(fleet.capacities[rows], held[rows].sum(axis=1, dtype=np.int32))
        extra = largest_per_row(np.where(held[rows], fleet.velocities[rows], 0), rest)
        quotas[rows] = held[rows] * share.astype(quotas.dtype)[:, None] + extra
    return quotas


def frequent(fleet: FleetProfiles, held: BoolArray) -> AnyArray:
    """Give one slot for each label and the rest for the most frequent.

    It is the most that (9a) can reach once S is fixed.

    It leaves (9d) to the label weights, as `even` does.
    """
    quotas = _quota_table(fleet)
    for rows in row_chunks(np.flatnonzero(held.any(axis=1))):
        own = held[rows].astype(quotas.dtype)
        best = np.where(held[rows], fleet.velocities[rows], -1).argmax(axis=1)
        own[np.arange(len(own)), best] += (fleet.capacities[rows] - own.sum(axis=1)).astype(
            quotas.dtype
        )
        quotas[rows] = own
    return quotas


QUANTITIES: dict[str, Callable[[FleetProfiles, BoolArray], AnyArray]] = {
    "even": even,
    "frequent": frequent,
}
"""Each gives every label held, S of Eq. 10 as a (C, Y) table, at least one slot and uses up each
device's capacity."""


def _quota_table(fleet: FleetProfiles) -> AnyArray:
    """Make an empty D, in the smallest integers that hold the largest capacity."""
    largest = int(fleet.capacities.max(initial=0))
    return np.zeros(fleet.velocities.shape, dtype=np.int16 if largest < 2**15 else np.int64)


def apportion(total: int, weights: FloatArray, minimum: int = 0) -> IntArray:
    """Share out `total` in proportion to `weights` by largest remainders.

    Each share at least `minimum`.

    >>> apportion(10, np.array([0.5, 0.3, 0.2])).tolist()
    [5, 3, 2]
    >>> apportion(4, np.array([9.0, 1.0]), minimum=1).tolist()
    [3, 1]
    """
    free = total - minimum * len(weights)
    if free < 0:
        raise ValueError(
            f"{total} cannot be shared among {len(weights)} with at least {minimum} each"
        )
    exact = free * (weights / weights.sum())
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: free - int(shares.sum())]] += 1
    return np.asarray(shares + minimum)
