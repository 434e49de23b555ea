"""The in-memory store: a bounded top-k per region (step 3; the paper's priority queues)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedkeep.core.ports import Fate, Outcome, Stored
from fedkeep.core.types import AnyArray, Batch, FloatArray, IntArray, Scores, State

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

    def effective(self, scores: Scores, uses: IntArray) -> Scores:
        """The scores that count for samples given in ascending order; -inf ranks below every newcomer."""
        if self.name != "discount":
            return scores
        places = np.arange(len(scores)) - self.discount * uses
        return np.where(places >= 0, scores[np.maximum(places, 0)], -np.inf)

    def gives_way(self, uses: int) -> bool:
        return self.name == "renew" and uses > 0


class _Entry:
    __slots__ = ("arrival", "id", "key", "region", "score", "uses", "x", "y")

    def __init__(self, id_: int, x: AnyArray, y: int, region: int, score: float, arrival: int) -> None:
        self.id, self.x, self.y, self.region = id_, x, y, region
        self.score, self.arrival, self.uses = score, arrival, 0
        self.key: _Key = (_RANKED, score, arrival)


class MemoryStore:
    """Implements the `Store` port with one heap per region; an offer costs O(log k), a hopeless one almost nothing."""

    def __init__(self, quotas: IntArray, after_use: AfterUse = AfterUse()) -> None:  # noqa: B008 - frozen
        self.after_use = after_use
        self._entries: dict[int, _Entry] = {}
        self._sizes = np.zeros(len(quotas), dtype=np.int64)
        self._heaps: list[list[tuple[_Key, int]]] = [[] for _ in quotas]
        self._quotas = np.zeros(len(quotas), dtype=np.int64)
        self.configure(quotas)

    def __len__(self) -> int:
        return len(self._entries)

    def configure(self, quotas: IntArray) -> None:
        if len(quotas) != len(self._heaps):
            raise ValueError(f"expected quotas for {len(self._heaps)} regions, got {len(quotas)}")
        self._quotas = np.array(quotas, dtype=np.int64)
        for region in np.flatnonzero(self._sizes > self._quotas):
            while self._sizes[region] > self._quotas[region]:
                self._drop(self._lowest(int(region)))

    def offer(self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray) -> Outcome:
        n = len(batch)
        outcome = Outcome(np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64), np.full(n, np.nan))
        always = self._seen_before(batch.ids)
        start = 0
        while start < n:
            start = self._offer_from(start, always, batch, regions, scores, arrivals, outcome)
        return outcome

    def stored(self) -> Stored:
        entries = self._by_arrival()
        x = np.stack([e.x for e in entries]) if entries else np.empty((0, 0), dtype=np.float32)
        batch = Batch(x, _ints(e.y for e in entries), _ints(e.id for e in entries))
        return Stored(
            batch,
            _ints(e.region for e in entries),
            np.array([e.score for e in entries], dtype=np.float64),
            _ints(e.arrival for e in entries),
            _ints(e.uses for e in entries),
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
            "tiers": _ints(key[0] for key in keys),
            "effective": np.array([key[1] for key in keys], dtype=np.float64),
            "quotas": self._quotas.copy(),
        }

    def restore(self, state: State) -> None:
        self._quotas = np.array(state["quotas"], dtype=np.int64)
        self._entries = {}
        self._sizes = np.zeros(len(self._quotas), dtype=np.int64)
        self._heaps = [[] for _ in self._quotas]
        plain = ("ids", "y", "regions", "scores", "arrivals", "uses", "tiers", "effective")
        for x, id_, y, region, score, arrival, uses, tier, effective in zip(
            state["x"], *(state[name].tolist() for name in plain), strict=True
        ):
            entry = _Entry(id_, x.copy(), y, region, score, arrival)
            entry.uses = uses
            entry.key = (tier, effective, arrival)
            self._insert(entry)

    def _seen_before(self, ids: IntArray) -> np.ndarray:
        """Which samples are stored or come twice in the batch: their offers may lower what is there."""
        known = np.isin(ids, np.fromiter(self._entries, np.int64, len(self._entries)))
        _, first, counts = np.unique(ids, return_inverse=True, return_counts=True)
        return known | (counts[first] > 1)

    def _offer_from(
        self,
        start: int,
        always: np.ndarray,
        batch: Batch,
        regions: IntArray,
        scores: Scores,
        arrivals: IntArray,
        outcome: Outcome,
    ) -> int:
        """Offers samples from `start` until a refresh lowers a floor; returns where to go on.

        Floors only rise otherwise, so a sample below its region's floor now stays hopeless and is skipped.
        """
        rest = slice(start, None)
        floors, open_regions = self._floors()
        outcome.floors[rest] = floors[regions[rest]]
        with np.errstate(invalid="ignore"):
            hopeful = (scores[rest] >= floors[regions[rest]]) | open_regions[regions[rest]]
        for i in (start + np.flatnonzero(hopeful & (scores[rest] > -np.inf) | always[rest])).tolist():
            entry = self._entries.get(int(batch.ids[i]))
            if entry is None:
                self._offer_new(i, batch, int(regions[i]), float(scores[i]), int(arrivals[i]), outcome)
            elif self._refresh(entry, float(scores[i]), int(arrivals[i]), i, outcome):
                return i + 1
        return len(batch)

    def _floors(self) -> tuple[FloatArray, np.ndarray]:
        """Per region the effective score to reach (NaN: none set), and whether anything at all gets in."""
        floors = np.full(len(self._heaps), np.nan)
        open_regions = self._sizes < self._quotas
        for region in np.flatnonzero(~open_regions & (self._quotas > 0)).tolist():
            tier, floors[region], _ = self._lowest(region).key
            open_regions[region] = tier == _GIVES_WAY
        return floors, open_regions

    def _offer_new(self, i: int, batch: Batch, region: int, score: float, arrival: int, outcome: Outcome) -> None:
        if not score > -np.inf or not self._quotas[region]:
            return
        entry = _Entry(int(batch.ids[i]), batch.x[i].copy(), int(batch.y[i]), region, score, arrival)
        if self._sizes[region] < self._quotas[region]:
            outcome.fates[i], outcome.floors[i] = Fate.KEPT, np.nan
        else:
            lowest = self._lowest(region)
            outcome.floors[i] = lowest.key[1]
            if entry.key < lowest.key:
                return
            self._drop(lowest)
            outcome.fates[i], outcome.displaced[i] = Fate.REPLACED, lowest.id
        self._insert(entry)

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
        return sorted(self._entries.values(), key=lambda e: e.arrival)

    def _rank_all(self) -> None:
        members: dict[int, list[_Entry]] = {}
        for entry in self._entries.values():
            members.setdefault(entry.region, []).append(entry)
        for region, entries in members.items():
            self._rank(region, entries)

    def _rank(self, region: int, entries: list[_Entry]) -> None:
        """Gives every sample of a region the key that its score, its uses and `after_use` call for."""
        entries.sort(key=lambda e: (e.score, e.arrival))
        scores = np.array([e.score for e in entries])
        effective = self.after_use.effective(scores, _ints(e.uses for e in entries))
        for entry, score in zip(entries, effective.tolist(), strict=True):
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


def _ints(values: object) -> IntArray:
    return np.fromiter(values, dtype=np.int64)  # type: ignore[call-overload,no-any-return]
