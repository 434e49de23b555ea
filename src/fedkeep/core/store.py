"""The in-memory store: a bounded top-k per region (step 3; the paper's priority queues)."""

import heapq
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Literal

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.ports import Fate, Outcome, Stored
from fedkeep.core.types import AnyArray, Batch, BoolArray, FloatArray, IntArray, Scores, State

_GIVES_WAY, _RANKED = 0, 1
"""Tiers of a key: what gives way is displaced by any newcomer; the rest ranks by score."""
_Key = tuple[int, float, int]
"""(tier, effective score, arrival): the lowest key leaves first, so that the newest wins ties."""
_ROOM: _Key = (_GIVES_WAY, np.nan, 0)
_NO_ROOM: _Key = (_RANKED + 1, np.nan, 0)


@dataclass(frozen=True)
class AfterUse:
    """What becomes of samples that were trained on.

    `keep` is the paper: their score is all that counts. `discount` lowers a sample's rank within its region by
    `discount` places for each use; ranks, since scores may be negative. `renew` lets any later arrival of the
    region displace the lowest sample that was trained on, whatever its score.
    """

    name: Literal["keep", "discount", "renew"] = "keep"
    discount: int = 1

    def __post_init__(self) -> None:
        within(self, "discount", least=0)

    def effective(self, scores: list[float], uses: list[int]) -> list[float]:
        """The scores that count for samples given in ascending order; -inf ranks below every newcomer."""
        if self.name != "discount":
            return scores
        places = [place - self.discount * used for place, used in enumerate(uses)]
        return [scores[place] if place >= 0 else -np.inf for place in places]

    def gives_way(self, uses: int) -> bool:
        return self.name == "renew" and uses > 0


class _Entry:
    __slots__ = ("arrival", "id", "key", "region", "score", "uses", "x", "y")

    def __init__(self, id_: int, x: AnyArray, y: int, region: int, score: float, arrival: int) -> None:
        self.id, self.x, self.y, self.region = id_, x, y, region
        self.score, self.arrival, self.uses = score, arrival, 0
        self.key: _Key = (_RANKED, score, arrival)


class MemoryStore:
    """Implements the `Store` port with one heap per region; an offer costs O(log k), a hopeless one almost nothing.

    Where the store `bends`, quotas are targets: a region may use what the others leave free, and when all slots are
    taken the lowest sample of the region most above its target goes (of equals the region that holds most, then the
    one with the oldest sample). Otherwise no region ever holds more than its quota, as in the paper.

    >>> store = MemoryStore(np.array([1, 1]), bends=True)
    >>> def come(number, region, score):
    ...     batch = Batch(np.zeros((1, 2)), np.array([region]), np.array([number]))
    ...     return Fate(store.offer(batch, batch.y, np.array([score]), batch.ids).fates[0]).name
    >>> [come(1, 0, 0.9), come(2, 0, 0.8), come(3, 0, 0.7)]  # region 1 lends its slot
    ['KEPT', 'KEPT', 'REFUSED']
    >>> come(4, 1, 0.1)  # and takes it back
    'REPLACED'
    >>> store.stored().batch.ids.tolist()
    [1, 4]
    """

    def __init__(
        self,
        quotas: IntArray,
        after_use: AfterUse = AfterUse(),
        *,
        bends: bool = False,
    ) -> None:
        self.after_use, self.bends = after_use, bends
        self._entries: dict[int, _Entry] = {}
        self._heaps: list[list[tuple[_Key, int]]] = [[] for _ in quotas]
        self._sizes = [0] * len(quotas)
        self._quotas, self._capacity = [0] * len(quotas), 0
        self._samples: tuple[Batch, IntArray, IntArray] | None = None
        """What `stored` says of samples, regions and arrivals, until one of them changes."""
        self.configure(quotas)

    def __len__(self) -> int:
        return len(self._entries)

    def configure(self, quotas: IntArray) -> list[int]:
        if len(quotas) != len(self._heaps):
            raise ValueError(f"expected quotas for {len(self._heaps)} regions, got {len(quotas)}")
        self._set_quotas(quotas)
        dropped = []
        while (region := self._overfull()) is not None:
            dropped.append(self._lowest(region).id)
            self._drop(self._entries[dropped[-1]])
        return dropped

    @property
    def regions(self) -> int:
        return len(self._quotas)

    def would_hold(self, counts: IntArray, quotas: IntArray) -> bool:
        """Whether so many samples of each region stay under these quotas."""
        return bool(counts.sum() <= quotas.sum() if self.bends else (counts <= quotas).all())

    def offer(self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray) -> Outcome:
        n = len(batch)
        outcome = Outcome(np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64), np.full(n, np.nan), scores)
        known = self._seen_before(batch.ids)
        start = 0
        while start < n:
            start = self._offer_from(start, known, batch, regions, scores, arrivals, outcome)
        return outcome

    def stored(self) -> Stored:
        entries = self._by_arrival()
        if self._samples is None:
            x = np.stack([e.x for e in entries]) if entries else np.empty((0, 0), dtype=np.float32)
            batch = Batch(x, _ints([e.y for e in entries]), _ints([e.id for e in entries]))
            self._samples = (batch, _ints([e.region for e in entries]), _ints([e.arrival for e in entries]))
        batch, regions, arrivals = self._samples
        scores = np.array([e.score for e in entries], dtype=np.float64)
        return Stored(batch, regions, scores, arrivals, _ints([e.uses for e in entries]))

    def revalue(self, scores: Scores) -> list[int]:
        dropped = []
        for entry, score in zip(self._by_arrival(), scores.tolist(), strict=True):
            entry.score = score
            if not score > -np.inf:
                self._drop(entry)
                dropped.append(entry.id)
        self._rank_all()
        return dropped

    def mark_used(self, ids: IntArray) -> None:
        for known in ids.tolist():
            if (entry := self._entries.get(known)) is not None:
                entry.uses += 1
        if self.after_use.name != "keep":
            self._rank_all()

    def expire(self, before: int) -> None:
        for entry in self._entries.values():
            if entry.arrival < before and entry.key[0] != _GIVES_WAY:
                self._rekey(entry, (_GIVES_WAY, *entry.key[1:]))

    def ranks(self) -> dict[str, AnyArray]:
        """What decides which sample leaves first, by arrival; without the samples, of which `stored` makes a copy."""
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

    def snapshot(self) -> State:
        batch = self.stored().batch
        return {"x": batch.x, "y": batch.y, **self.ranks(), "quotas": _ints(self._quotas)}

    def restore(self, state: State) -> None:
        self._set_quotas(state["quotas"])
        self._entries, self._samples = {}, None
        self._sizes = [0] * len(self._quotas)
        self._heaps = [[] for _ in self._quotas]
        plain = ("ids", "y", "regions", "scores", "arrivals", "uses", "tiers", "effective")
        for x, id_, y, region, score, arrival, uses, tier, effective in zip(
            state["x"], *(state[name].tolist() for name in plain), strict=True
        ):
            entry = _Entry(id_, x.copy(), y, region, score, arrival)
            entry.uses = uses
            entry.key = (tier, effective, arrival)
            self._insert(entry)

    def _set_quotas(self, quotas: IntArray) -> None:
        self._quotas = quotas.tolist()
        self._capacity = sum(self._quotas)

    def _seen_before(self, ids: IntArray) -> BoolArray:
        """Which samples are stored or come twice in the batch: their offers may lower what is there."""
        plain = ids.tolist()
        known = np.array([id_ in self._entries for id_ in plain], dtype=bool)
        if len(set(plain)) < len(plain):
            _, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
            known |= counts[place] > 1
        return known

    def _offer_from(
        self,
        start: int,
        known: BoolArray,
        batch: Batch,
        regions: IntArray,
        scores: Scores,
        arrivals: IntArray,
        outcome: Outcome,
    ) -> int:
        """Offers samples from `start` until one of them lowers a floor; returns where to go on.

        Floors only rise otherwise, so a sample below its region's floor now stays hopeless and is skipped.
        """
        lowest = [self._key_to_beat(region) for region in range(len(self._quotas))]
        floors, unreachable = _floors(lowest)
        outcome.floors[start:] = floors[regions[start:]]
        hopeful = (scores[start:] >= unreachable[regions[start:]]) & (scores[start:] > -np.inf)
        index = start + np.flatnonzero(hopeful | known[start:])
        plain = (index, batch.ids[index], regions[index], scores[index], arrivals[index])
        for i, id_, region, score, arrival in zip(*(column.tolist() for column in plain), strict=True):
            entry, key = self._entries.get(id_), (_RANKED, score, arrival)
            if self.bends and key >= lowest[region]:  # which other regions may have raised since
                lowest[region] = self._key_to_beat(region)
            if entry is not None:
                easier = self._refresh(entry, score, arrival, i, outcome)
            elif key < lowest[region] or not score > -np.inf:
                outcome.floors[i] = lowest[region][1]
                continue
            else:
                easier = self._make_room(region, i, outcome)
                self._insert(_Entry(id_, batch.x[i].copy(), int(batch.y[i]), region, score, arrival))
            before, lowest[region] = lowest[region], self._key_to_beat(region)
            if easier or lowest[region] < before:
                return int(i) + 1
        return len(batch)

    def _key_to_beat(self, region: int) -> _Key:
        """The key that a newcomer of the region must not be below."""
        giver = self._giver(region)
        if giver != region:
            return _ROOM
        return self._lowest(region).key if self._sizes[region] else _NO_ROOM

    def _giver(self, region: int) -> int | None:
        """The region that gives up a sample for a newcomer of `region`; None while there is room."""
        if not self.bends:
            return region if self._sizes[region] >= self._quotas[region] else None
        return self._most_above(region) if len(self._entries) >= self._capacity else None

    def _most_above(self, newcomer: int | None = None) -> int:
        """The region most above its target, a newcomer counting as held; of equals the fullest, then the oldest."""
        highest, level = _fullest(tuple(self._sizes), tuple(self._quotas))
        if newcomer is not None:
            held = self._sizes[newcomer] + 1
            rank = (held - self._quotas[newcomer], held)
            if rank >= highest:
                level = (newcomer,) if rank > highest else tuple(sorted((*level, newcomer)))
        if len(level) == 1:
            return level[0]
        oldest = dict.fromkeys(level, np.inf)
        for entry in self._entries.values():
            if entry.region in oldest:
                oldest[entry.region] = min(oldest[entry.region], entry.arrival)
        return min(level, key=lambda region: oldest[region])

    def _overfull(self) -> int | None:
        """A region that holds more than it may; None if there is none."""
        if self.bends:
            return self._most_above() if len(self._entries) > self._capacity else None
        sizes = zip(self._sizes, self._quotas, strict=True)
        return next((region for region, (size, quota) in enumerate(sizes) if size > quota), None)

    def _make_room(self, region: int, i: int, outcome: Outcome) -> bool:
        """Drops what the sample at `i` displaces, if need be; True if regions other than its own are concerned."""
        giver = self._giver(region)
        if giver is None:
            outcome.fates[i], outcome.floors[i] = Fate.KEPT, np.nan
            return self.bends and len(self._entries) + 1 == self._capacity
        displaced = self._lowest(giver)
        self._drop(displaced)
        outcome.fates[i], outcome.displaced[i], outcome.floors[i] = Fate.REPLACED, displaced.id, displaced.key[1]
        return giver != region

    def _refresh(self, entry: _Entry, score: float, arrival: int, i: int, outcome: Outcome) -> bool:
        """Renews a stored sample's score; True if its region is easier to enter than before."""
        if not score > -np.inf:
            self._drop(entry)
            outcome.displaced[i] = entry.id
            return True
        before = entry.key
        entry.score, entry.arrival = score, arrival
        self._samples = None
        outcome.fates[i], outcome.floors[i] = Fate.REFRESHED, before[1]
        if entry.uses and self.after_use.name == "discount":
            self._rank(entry.region, [e for e in self._entries.values() if e.region == entry.region])
            return True
        tier = _GIVES_WAY if self.after_use.gives_way(entry.uses) else _RANKED
        self._rekey(entry, (tier, score, arrival))
        return self.bends or entry.key < before

    def _by_arrival(self) -> list[_Entry]:
        return sorted(self._entries.values(), key=attrgetter("arrival"))

    def _rank_all(self) -> None:
        members: dict[int, list[_Entry]] = {}
        for entry in self._entries.values():
            members.setdefault(entry.region, []).append(entry)
        for region, entries in members.items():
            self._rank(region, entries)

    def _rank(self, region: int, entries: list[_Entry]) -> None:
        """Gives every sample of a region the key that its score, its uses and `after_use` call for."""
        entries.sort(key=attrgetter("score", "arrival"))
        effective = self.after_use.effective([e.score for e in entries], [e.uses for e in entries])
        for entry, score in zip(entries, effective, strict=True):
            tier = _GIVES_WAY if self.after_use.gives_way(entry.uses) else _RANKED
            entry.key = (tier, score, entry.arrival)
        self._heaps[region] = [(e.key, e.id) for e in entries]
        heapq.heapify(self._heaps[region])

    def _insert(self, entry: _Entry) -> None:
        self._entries[entry.id] = entry
        self._samples = None
        self._sizes[entry.region] += 1
        heapq.heappush(self._heaps[entry.region], (entry.key, entry.id))

    def _drop(self, entry: _Entry) -> None:
        """Forgets a sample; its heap item goes when it surfaces."""
        del self._entries[entry.id]
        self._samples = None
        self._sizes[entry.region] -= 1

    def _rekey(self, entry: _Entry, key: _Key) -> None:
        entry.key = key
        heap = self._heaps[entry.region]
        heapq.heappush(heap, (key, entry.id))
        if len(heap) > 2 * self._sizes[entry.region] + 8:
            heap[:] = filter(self._is_current, heap)
            heapq.heapify(heap)

    def _lowest(self, region: int) -> _Entry:
        heap = self._heaps[region]
        while not self._is_current(heap[0]):
            heapq.heappop(heap)
        return self._entries[heap[0][1]]

    def _is_current(self, item: tuple[_Key, int]) -> bool:
        """Whether a heap item still speaks of a stored sample's present key."""
        key, id_ = item
        entry = self._entries.get(id_)
        return entry is not None and entry.key == key


@lru_cache(maxsize=1024)
def _fullest(sizes: tuple[int, ...], quotas: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, ...]]:
    """How far regions are above their targets and what they hold, at the most, and the regions of which that is true.

    Most offers leave the sizes as they are, so the same is asked again and again.
    """
    rank = [(size - quota, size) for size, quota in zip(sizes, quotas, strict=True)]
    highest = max(rank)
    return highest, tuple(region for region, of_region in enumerate(rank) if of_region == highest)


def _floors(lowest: list[_Key]) -> tuple[FloatArray, FloatArray]:
    """Per region the lowest effective score (NaN where there is none), and the score that gets in at the least."""
    least = [(-np.inf, key[1], np.inf)[key[0]] for key in lowest]
    return np.array([key[1] for key in lowest]), np.array(least)


def _ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
