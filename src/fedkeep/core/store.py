"""The in-memory store: a bounded top-k per region (step 3; the paper's priority queues)."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappush, heapreplace
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.protocols import OfferResult, Outcome, Stored
from fedkeep.core.types import AnyArray, ArraySpec, Batch, IntArray, Scores, State, StateSpec

_GIVES_WAY, _RANKED = 0, 1
"""Tiers of a key: what gives way is evicted for any newcomer; the rest ranks by score."""
_Key = tuple[int, float, int]
"""(tier, effective score, arrival): the lowest key leaves first, so that the newest wins ties."""
_ROOM: _Key = (_GIVES_WAY, np.nan, 0)
_NO_ROOM: _Key = (_RANKED + 1, np.nan, 0)
_LATER: AnyArray = np.empty(0)
"""Stands for a sample's features until it is known that it stays."""
_ONE_MORE = (1 << 32) + 1
"""One sample more in `MemoryStore._pressure`: above the target, and held."""


@dataclass(frozen=True)
class AfterUse:
    """What becomes of samples that were trained on.

    `keep` is the paper: their score is all that counts. `discount` lowers a sample's rank within
    its region by `discount` places for each use; ranks, since scores may be negative.
    `evict_trained_first` lets any later arrival of the region displace the lowest sample that was
    trained on, whatever its score.
    """

    name: Literal["keep", "discount", "evict_trained_first"] = "keep"
    discount: int = 1

    def __post_init__(self) -> None:
        check_range(self, "discount", least=0)

    def tier(self, uses: int) -> int:
        """Give the tier of a sample used so often."""
        return _GIVES_WAY if self.name == "evict_trained_first" and uses > 0 else _RANKED


class _Entry:
    __slots__ = ("arrival", "id", "key", "region", "score", "uses", "x", "y")

    def __init__(
        self, id_: int, x: AnyArray, y: Any, region: int, score: float, arrival: int
    ) -> None:
        self.id, self.x, self.y, self.region = id_, x, y, region
        self.score, self.arrival, self.uses = score, arrival, 0
        self.key: _Key = (_RANKED, score, arrival)


_key: Callable[[_Entry], _Key] = attrgetter("key")


def _entry_of(batch: Batch, i: int, region: int, scores: Scores, arrivals: IntArray) -> _Entry:
    """Make the entry of a sample, with its own copy of the features."""
    x, y = batch.x[i].copy(), _own(batch.y[i])
    return _Entry(int(batch.ids[i]), x, y, region, float(scores[i]), int(arrivals[i]))


class MemoryStore:
    """A `Store` in memory, with a sorted list per region; a hopeless offer costs almost nothing.

    With `soft_quotas`, quotas are targets: a region may use what the others leave free, and
    when all slots are taken the lowest sample of the region most above its target goes (of equals
    the region that holds most, then the one with the oldest sample). Otherwise no region ever holds
    more than its quota, as in the paper.

    >>> store = MemoryStore(np.array([1, 1]), soft_quotas=True)
    >>> def come(number, region, score):
    ...     batch = Batch(np.zeros((1, 2)), np.array([region]), np.array([number]))
    ...     outcome = store.offer(batch, batch.y, np.array([score]), batch.ids)
    ...     return OfferResult(outcome.results[0]).name
    >>> [come(1, 0, 0.9), come(2, 0, 0.8), come(3, 0, 0.7)]  # region 1 lends its slot
    ['KEPT', 'KEPT', 'REFUSED']
    >>> come(4, 1, 0.1)  # and takes it back
    'REPLACED'
    >>> store.stored().batch.ids.tolist()
    [1, 4]
    """

    def __init__(
        self, quotas: IntArray, after_use: AfterUse = AfterUse(), *, soft_quotas: bool = False
    ) -> None:
        self.after_use, self.soft_quotas, self.regions = after_use, soft_quotas, len(quotas)
        self._quotas: list[int] = quotas.tolist()
        self._entries: dict[int, _Entry] = {}
        self._ranked: list[list[_Entry]] = [[] for _ in quotas]
        """The samples of each region, the lowest key first."""
        self._slots = 0
        """All quotas."""
        self._pressure: list[int] = []
        """How far each region is above its quota, and then how much it holds, in one number."""
        self._weigh()
        self._no_target: AnyArray = _ints([])
        """What an empty store has for targets: labels, until numbers to predict have come."""
        self._samples: tuple[Batch, IntArray, IntArray] | None = None
        """What `stored` says of samples, regions and arrivals, until one of them changes."""
        self._unranked = False
        """Whether scores or uses have changed since samples were ranked."""

    def __len__(self) -> int:
        return len(self._entries)

    def configure(self, quotas: IntArray) -> list[int]:
        """Set the slots of each region."""
        if len(quotas) != self.regions:
            raise ValueError(f"expected quotas for {self.regions} regions, got {len(quotas)}")
        self._settle()
        self._quotas = quotas.tolist()
        self._weigh()
        dropped = []
        while self.soft_quotas and len(self._entries) > self._slots:
            dropped.append(self._drop(self._ranked[self._most_above()][0]))
        for ranked, quota in zip(self._ranked, self._quotas, strict=True):
            while not self.soft_quotas and len(ranked) > quota:
                dropped.append(self._drop(ranked[0]))
        return dropped

    def would_hold(self, counts: IntArray, quotas: IntArray) -> bool:
        """Tell whether so many samples of each region stay under these quotas."""
        return bool(counts.sum() <= quotas.sum() if self.soft_quotas else (counts <= quotas).all())

    def offer(self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray) -> Outcome:
        """Offer samples in order."""
        self._settle()
        self._notice(batch.y)
        if self.regions == 1 and len(batch) > len(self._entries):
            if self._is_queue(batch.ids, scores, arrivals):
                return self._offer_to_queue(batch, scores, arrivals)
            if self._knows_none(batch.ids.tolist()):
                return self._offer_unknown(batch, scores, arrivals)
        return self._offer_each(batch, regions, scores, arrivals)

    def _offer_each(
        self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray
    ) -> Outcome:
        """Offer any samples, one after the other."""
        n, entries = len(batch), self._entries
        results, evicted, thresholds = [int(OfferResult.REFUSED)] * n, [-1] * n, [np.nan] * n
        unknown = [np.nan] * self.regions
        least = unknown.copy()
        """The score to beat, by region, until something changes; NaN: to be found, or none."""
        added: list[tuple[int, _Entry]] = []
        columns = zip(*(c.tolist() for c in (batch.ids, regions, scores, arrivals)), strict=True)
        for i, (id_, region, score, arrival) in enumerate(columns):
            if score < least[region] and id_ not in entries:
                thresholds[i] = least[region]
                continue
            entry, sound = entries.get(id_), score > -np.inf
            if entry is None:
                to_beat, leaving = self._way_in(region)
                if not sound or (_RANKED, score, arrival) < to_beat:
                    thresholds[i] = to_beat[1]
                    if to_beat[0] == _RANKED:
                        least[region] = to_beat[1]
                    continue
                results[i] = OfferResult.KEPT if leaving is None else OfferResult.REPLACED
                if leaving is not None:
                    thresholds[i], evicted[i] = leaving.key[1], leaving.id
                    self._drop(leaving)
                entry = _Entry(id_, _LATER, 0, region, score, arrival)
                self._insert(entry)
                added.append((i, entry))
                if leaving is not None and leaving.region == region:
                    least[region] = np.nan  # in no other region has anything changed
                    continue
            elif sound:
                results[i], thresholds[i] = OfferResult.REFRESHED, entry.key[1]
                entry.score, entry.arrival = score, arrival
                self._rekey(entry, (self.after_use.tier(entry.uses), score, arrival))
                if entry.uses and self.after_use.name == "discount":
                    self._rank(self._ranked[entry.region])
            else:
                evicted[i] = self._drop(entry)
            least = unknown.copy()
        # Most of them may have left again: only what stays is copied.
        for i, entry in [(i, own) for i, own in added if entries.get(own.id) is own]:
            entry.x, entry.y = batch.x[i].copy(), _own(batch.y[i])
        return Outcome(
            _ints(results), _ints(evicted), np.array(thresholds, dtype=np.float64), scores
        )

    def _is_queue(self, ids: IntArray, scores: Scores, arrivals: IntArray) -> bool:
        """Tell whether each sample ranks above all before it, and none is stored when it comes."""
        ranked, slots = self._ranked[0], self._slots
        if not 0 < slots >= len(ranked) or not scores[0] > -np.inf:
            return False
        if ranked and ranked[-1].key >= (_RANKED, float(scores[0]), int(arrivals[0])):
            return False
        if not (scores[1:] > scores[:-1]).all():
            return False
        # Whoever leaves is the oldest: a sample has left when `slots` others have come.
        queue = np.concatenate([_ints([entry.id for entry in ranked]), ids])
        order = np.argsort(queue, kind="stable")
        again = queue[order[1:]] == queue[order[:-1]]
        return bool((np.diff(order)[again] > slots).all())

    def _offer_to_queue(self, batch: Batch, scores: Scores, arrivals: IntArray) -> Outcome:
        """Offer samples that each rank above all before them, as under FIFO: the oldest leave."""
        n, ranked, slots = len(batch), self._ranked[0], self._slots
        free = slots - len(ranked)
        leaving = max(n - free, 0)
        results = np.full(n, int(OfferResult.REPLACED))
        evicted, thresholds = np.full(n, -1), np.full(n, np.nan)
        results[:free] = int(OfferResult.KEPT)
        evicted[free:] = np.concatenate([_ints([e.id for e in ranked]), batch.ids])[:leaving]
        thresholds[free:] = np.concatenate([[e.key[1] for e in ranked], scores])[:leaving]
        for entry in ranked[:leaving]:
            self._drop(entry)
        for i in range(max(n - slots, 0), n):
            self._insert(_entry_of(batch, i, 0, scores, arrivals))
        return Outcome(results, evicted, thresholds, scores)

    def _knows_none(self, ids: list[int]) -> bool:
        """Tell whether no sample comes again, be it stored or of the same batch."""
        return len(set(ids)) == len(ids) and self._entries.keys().isdisjoint(ids)

    def _offer_unknown(self, batch: Batch, scores: Scores, arrivals: IntArray) -> Outcome:
        """Offer many samples of the only region: a heap tells what leaves, and few get an entry."""
        n, ids, ranked = len(batch), batch.ids.tolist(), self._ranked[0]
        results, evicted, thresholds = [int(OfferResult.REFUSED)] * n, [-1] * n, [np.nan] * n
        heap = [(entry.key, place - len(ranked)) for place, entry in enumerate(ranked)]
        free = self._slots - len(heap)
        for i, (score, arrival) in enumerate(zip(scores.tolist(), arrivals.tolist(), strict=True)):
            sound, key = score > -np.inf, (_RANKED, score, arrival)
            if free > 0:
                if sound:
                    results[i] = OfferResult.KEPT
                    heappush(heap, (key, i))
                    free -= 1
            elif heap:
                thresholds[i] = heap[0][0][1]
                if sound and key >= heap[0][0]:
                    results[i] = OfferResult.REPLACED
                    _, place = heapreplace(heap, (key, i))
                    evicted[i] = ids[place] if place >= 0 else ranked[place].id
        stay = {place for _, place in heap}
        for entry in [e for place, e in enumerate(ranked, -len(ranked)) if place not in stay]:
            self._drop(entry)
        for i in sorted(place for place in stay if place >= 0):
            self._insert(_entry_of(batch, i, 0, scores, arrivals))
        return Outcome(
            _ints(results), _ints(evicted), np.array(thresholds, dtype=np.float64), scores
        )

    def stored(self) -> Stored:
        """Give what is stored, oldest arrival first."""
        entries = self._by_arrival()
        if self._samples is None:
            x = np.stack([e.x for e in entries]) if entries else np.empty((0, 0), dtype=np.float32)
            y = np.array([e.y for e in entries], dtype=self._no_target.dtype)
            y = y.reshape(len(entries), *self._no_target.shape[1:])
            batch = Batch(x, y, _ints([e.id for e in entries]))
            self._samples = (
                batch,
                _ints([e.region for e in entries]),
                _ints([e.arrival for e in entries]),
            )
        batch, regions, arrivals = self._samples
        scores = np.array([e.score for e in entries], dtype=np.float64)
        return Stored(batch, regions, scores, arrivals, _ints([e.uses for e in entries]))

    def rescore(self, scores: Scores) -> list[int]:
        """Set new scores for all that is stored."""
        dropped = []
        for entry, score in zip(self._by_arrival(), scores.tolist(), strict=True):
            entry.score = score
            if not score > -np.inf:
                dropped.append(self._drop(entry))
        self._unranked = True
        return dropped

    def mark_used(self, ids: IntArray) -> None:
        """Count one more participation for these samples."""
        for known in ids.tolist():
            if (entry := self._entries.get(known)) is not None:
                entry.uses += 1
        self._unranked = self._unranked or self.after_use.name != "keep"

    def expire(self, before: int) -> None:
        """Let samples that arrived before `before` make way."""
        self._settle()
        for entry in [*self._entries.values()]:
            if entry.arrival < before and entry.key[0] != _GIVES_WAY:
                self._rekey(entry, (_GIVES_WAY, *entry.key[1:]))

    def label_of(self, id_: int) -> Any:
        """Give the label of a stored sample; None if no sample of that id is stored."""
        entry = self._entries.get(id_)
        return None if entry is None else entry.y

    def relabel(self, id_: int, label: Any, region: int, score: float) -> list[int]:
        """Correct the label of a stored sample; what no longer fits its region's slots goes."""
        self._settle()
        entry = self._entries[id_]
        self._drop(entry)
        entry.y, entry.region, entry.score = label, region, score
        entry.key = (self.after_use.tier(entry.uses), score, entry.arrival)
        self._insert(entry)
        if not score > -np.inf:
            return [self._drop(entry)]
        if entry.uses and self.after_use.name == "discount":
            self._rank(self._ranked[region])
        return self.configure(_ints(self._quotas))

    def remove(self, ids: Iterable[int]) -> None:
        """Take samples out, as far as they are stored."""
        self._settle()
        for id_ in ids:
            if (entry := self._entries.get(id_)) is not None:
                self._drop(entry)

    def ranks(self) -> dict[str, AnyArray]:
        """Give what decides which sample leaves first, by arrival, without the samples."""
        self._settle()
        entries = self._by_arrival()
        return {
            "ids": _ints([e.id for e in entries]),
            "regions": _ints([e.region for e in entries]),
            "arrivals": _ints([e.arrival for e in entries]),
            "uses": _ints([e.uses for e in entries]),
            "scores": np.array([e.score for e in entries], dtype=np.float64),
            "tiers": _ints([e.key[0] for e in entries]),
            "effective": np.array([e.key[1] for e in entries], dtype=np.float64),
        }

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`; those of samples are as long as the store is full."""
        return {
            "quotas": ArraySpec((self.regions,), np.int64),
            "*": ArraySpec((0,), np.float64, optional=True),
        }

    def snapshot(self) -> State:
        """Take the state as plain arrays."""
        batch = self.stored().batch
        return {"x": batch.x, "y": batch.y, **self.ranks(), "quotas": _ints(self._quotas)}

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        self._quotas = state["quotas"].tolist()
        self._entries, self._samples, self._unranked = {}, None, False
        self._ranked = [[] for _ in self._quotas]
        self._weigh()
        plain = ("ids", "regions", "scores", "arrivals", "uses", "tiers", "effective")
        self._notice(state["y"])
        for x, y, id_, region, score, arrival, uses, tier, effective in zip(
            state["x"], state["y"], *(state[name].tolist() for name in plain), strict=True
        ):
            entry = _Entry(id_, x.copy(), _own(y), region, score, arrival)
            entry.uses, entry.key = uses, (tier, effective, arrival)
            self._insert(entry)

    def _notice(self, y: AnyArray) -> None:
        """Note the form of targets that are no labels."""
        if y.dtype.kind == "f" and self._no_target.dtype.kind != "f":
            self._no_target, self._samples = np.empty((0, *y.shape[1:])), None

    def _way_in(self, region: int) -> tuple[_Key, _Entry | None]:
        """Find the key that a newcomer must not be below, and what leaves for it, if anything."""
        held, slots = len(self._ranked[region]), self._quotas[region]
        if self.soft_quotas:
            held, slots = len(self._entries), self._slots
        if held < slots:
            return _ROOM, None
        several = self.soft_quotas and self.regions > 1
        giver = self._most_above(region) if several else region
        if not self._ranked[giver]:
            return _NO_ROOM, None
        lowest = self._ranked[giver][0]
        return lowest.key if giver == region else _ROOM, lowest

    def _most_above(self, newcomer: int | None = None) -> int:
        """Find the region most above its target; of equals the fullest, then the oldest.

        A newcomer counts as held.
        """
        pressure = self._pressure
        if newcomer is not None:
            pressure = pressure.copy()
            pressure[newcomer] += _ONE_MORE
        highest = max(pressure)
        if pressure.count(highest) == 1:
            return pressure.index(highest)
        level = [region for region, own in enumerate(pressure) if own == highest]
        return min(
            level, key=lambda region: min((e.arrival for e in self._ranked[region]), default=np.inf)
        )

    def _by_arrival(self) -> list[_Entry]:
        return sorted(self._entries.values(), key=attrgetter("arrival"))

    def _settle(self) -> None:
        """Rank samples anew where scores or uses have changed."""
        if self._unranked:
            self._unranked = False
            for ranked in self._ranked:
                if ranked:
                    self._rank(ranked)

    def _rank(self, ranked: list[_Entry]) -> None:
        """Give every sample of a region the key for its score, its uses and `after_use`."""
        ranked.sort(key=attrgetter("score", "arrival"))
        scores = [e.score for e in ranked]
        discount = self.after_use.discount if self.after_use.name == "discount" else 0
        for place, entry in enumerate(ranked):
            lowered = place - discount * entry.uses
            effective = (
                scores[lowered] if lowered >= 0 else -np.inf
            )  # which ranks below every newcomer
            entry.key = (self.after_use.tier(entry.uses), effective, entry.arrival)
        ranked.sort(key=_key)

    def _rekey(self, entry: _Entry, key: _Key) -> None:
        self._drop(entry)
        entry.key = key
        self._insert(entry)

    def _weigh(self) -> None:
        """Find `_slots` and `_pressure` anew, as quotas have changed."""
        self._slots = sum(self._quotas)
        self._pressure = [
            ((len(ranked) - quota) << 32) + len(ranked)
            for ranked, quota in zip(self._ranked, self._quotas, strict=True)
        ]

    def _insert(self, entry: _Entry) -> None:
        self._entries[entry.id] = entry
        self._samples = None
        self._pressure[entry.region] += _ONE_MORE
        ranked = self._ranked[entry.region]
        if ranked and entry.key < ranked[-1].key:
            insort(ranked, entry, key=_key)
        else:
            ranked.append(entry)

    def _drop(self, entry: _Entry) -> int:
        del self._entries[entry.id]
        self._samples = None
        self._pressure[entry.region] -= _ONE_MORE
        ranked = self._ranked[entry.region]
        lowest = ranked[0] is entry
        del ranked[0 if lowest else ranked.index(entry, bisect_left(ranked, entry.key, key=_key))]
        return entry.id


def _own(y: Any) -> Any:
    """One sample's target in memory of its own: a number, or several."""
    return y.copy() if y.ndim else y.item()


def _ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
