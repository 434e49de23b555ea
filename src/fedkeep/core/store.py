"""The in-memory store: a bounded top-k per region (step 3; the paper's priority queues)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np

from fedkeep.core.ports import Fate, Outcome, Stored
from fedkeep.core.types import AnyArray, Batch, BoolArray, FloatArray, IntArray, Scores, State

_GIVES_WAY, _RANKED = 0, 1
"""Tiers of a key: what gives way is displaced by any newcomer; the rest ranks by score."""
_Key = tuple[int, float, int]
"""(tier, effective score, arrival): the lowest key leaves first, so that the newest wins ties."""


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
        if self.discount < 0:
            raise ValueError(f"discount must be 0 or more, got {self.discount}")

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


class _Offer(NamedTuple):
    id: int
    region: int
    score: float
    arrival: int


class MemoryStore:
    """Implements the `Store` port with one heap per region; an offer costs O(log k), a hopeless one almost nothing."""

    def __init__(self, quotas: IntArray, after_use: AfterUse = AfterUse()) -> None:  # noqa: B008 - frozen
        self.after_use = after_use
        self._entries: dict[int, _Entry] = {}
        self._heaps: list[list[tuple[_Key, int]]] = [[] for _ in quotas]
        self._sizes = [0] * len(quotas)
        self._quotas = [0] * len(quotas)
        self.configure(quotas)

    def __len__(self) -> int:
        return len(self._entries)

    def configure(self, quotas: IntArray) -> None:
        if len(quotas) != len(self._heaps):
            raise ValueError(f"expected quotas for {len(self._heaps)} regions, got {len(quotas)}")
        self._quotas = quotas.tolist()
        for region, quota in enumerate(self._quotas):
            while self._sizes[region] > quota:
                self._drop(self._lowest(region))

    def offer(self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray) -> Outcome:
        n = len(batch)
        outcome = Outcome(np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64), np.full(n, np.nan))
        known = self._seen_before(batch.ids)
        start = 0
        while start < n:
            start = self._offer_from(start, known, batch, regions, scores, arrivals, outcome)
        return outcome

    def stored(self) -> Stored:
        entries = self._by_arrival()
        x = np.stack([e.x for e in entries]) if entries else np.empty((0, 0), dtype=np.float32)
        batch = Batch(x, _ints([e.y for e in entries]), _ints([e.id for e in entries]))
        return Stored(
            batch,
            _ints([e.region for e in entries]),
            np.array([e.score for e in entries], dtype=np.float64),
            _ints([e.arrival for e in entries]),
            _ints([e.uses for e in entries]),
        )

    def revalue(self, scores: Scores) -> None:
        for entry, score in zip(self._by_arrival(), scores.tolist(), strict=True):
            entry.score = score
            if not score > -np.inf:
                self._drop(entry)
        self._rank_all()

    def mark_used(self) -> None:
        for entry in self._entries.values():
            entry.uses += 1
        if self.after_use.name != "keep":
            self._rank_all()

    def expire(self, before: int) -> None:
        for entry in self._entries.values():
            if entry.arrival < before and entry.key[0] != _GIVES_WAY:
                self._rekey(entry, (_GIVES_WAY, *entry.key[1:]))

    def snapshot(self) -> State:
        stored = self.stored()
        keys = [e.key for e in self._by_arrival()]
        return {
            "x": stored.batch.x,
            "y": stored.batch.y,
            "ids": stored.batch.ids,
            "regions": stored.regions,
            "scores": stored.scores,
            "arrivals": stored.arrivals,
            "uses": stored.uses,
            "tiers": _ints([key[0] for key in keys]),
            "effective": np.array([key[1] for key in keys], dtype=np.float64),
            "quotas": _ints(self._quotas),
        }

    def restore(self, state: State) -> None:
        self._quotas = state["quotas"].tolist()
        self._entries = {}
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
        """Offers samples from `start` until a refresh lowers a floor; returns where to go on.

        Floors only rise otherwise, so a sample below its region's floor now stays hopeless and is skipped.
        """
        floors, unreachable = self._floors()
        outcome.floors[start:] = floors[regions[start:]]
        hopeful = (scores[start:] >= unreachable[regions[start:]]) & (scores[start:] > -np.inf)
        index = start + np.flatnonzero(hopeful | known[start:])
        plain = (index, batch.ids[index], regions[index], scores[index], arrivals[index])
        for i, id_, region, score, arrival in zip(*(column.tolist() for column in plain), strict=True):
            entry = self._entries.get(id_)
            if entry is None:
                self._offer_new(i, _Offer(id_, region, score, arrival), batch, outcome)
            elif self._refresh(entry, score, arrival, i, outcome):
                return int(i) + 1
        return len(batch)

    def _floors(self) -> tuple[FloatArray, FloatArray]:
        """Per region the lowest effective score (NaN where there is room), and the score that gets in at the least."""
        lowest, least = [], []
        for region, quota in enumerate(self._quotas):
            if self._sizes[region] < quota:
                lowest.append(np.nan)
                least.append(-np.inf)
            elif not quota:
                lowest.append(np.nan)
                least.append(np.inf)
            else:
                tier, score, _ = self._lowest(region).key
                lowest.append(score)
                least.append(score if tier == _RANKED else -np.inf)
        return np.array(lowest), np.array(least)

    def _offer_new(self, i: int, offer: _Offer, batch: Batch, outcome: Outcome) -> None:
        quota = self._quotas[offer.region]
        if not quota or not offer.score > -np.inf:
            return
        if self._sizes[offer.region] < quota:
            outcome.fates[i], outcome.floors[i] = Fate.KEPT, np.nan
        else:
            lowest = self._lowest(offer.region)
            outcome.floors[i] = lowest.key[1]
            if (_RANKED, offer.score, offer.arrival) < lowest.key:
                return
            self._drop(lowest)
            outcome.fates[i], outcome.displaced[i] = Fate.REPLACED, lowest.id
        self._insert(_Entry(offer.id, batch.x[i].copy(), int(batch.y[i]), *offer[1:]))

    def _refresh(self, entry: _Entry, score: float, arrival: int, i: int, outcome: Outcome) -> bool:
        """Renews a stored sample's score; True if its region is easier to enter than before."""
        if not score > -np.inf:
            self._drop(entry)
            return True
        before = entry.key
        entry.score, entry.arrival = score, arrival
        outcome.fates[i], outcome.floors[i] = Fate.REFRESHED, before[1]
        if entry.uses and self.after_use.name == "discount":
            self._rank(entry.region, [e for e in self._entries.values() if e.region == entry.region])
            return True
        self._rekey(entry, (before[0] if entry.uses else _RANKED, score, arrival))
        return entry.key < before

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
        self._sizes[entry.region] += 1
        heapq.heappush(self._heaps[entry.region], (entry.key, entry.id))

    def _drop(self, entry: _Entry) -> None:
        """Forgets a sample; its heap item goes when it surfaces."""
        del self._entries[entry.id]
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


def _ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
