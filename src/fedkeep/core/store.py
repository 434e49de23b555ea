"""The in-memory store: a bounded top-k per region (step 3; the paper's priority queues)."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.protocols import OfferResult, Outcome, Stored
from fedkeep.core.types import AnyArray, Batch, IntArray, Scores, State

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
    `discount` places for each use; ranks, since scores may be negative. `evict_trained_first` lets any later arrival of the
    region displace the lowest sample that was trained on, whatever its score.
    """

    name: Literal["keep", "discount", "evict_trained_first"] = "keep"
    discount: int = 1

    def __post_init__(self) -> None:
        check_range(self, "discount", least=0)

    def tier(self, uses: int) -> int:
        return _GIVES_WAY if self.name == "evict_trained_first" and uses > 0 else _RANKED


class _Entry:
    __slots__ = ("arrival", "id", "key", "region", "score", "uses", "x", "y")

    def __init__(
        self, id_: int, x: AnyArray, y: int, region: int, score: float, arrival: int
    ) -> None:
        self.id, self.x, self.y, self.region = id_, x, y, region
        self.score, self.arrival, self.uses = score, arrival, 0
        self.key: _Key = (_RANKED, score, arrival)


class MemoryStore:
    """Implements the `Store` port with a sorted list per region; a hopeless offer costs almost nothing.

    Where the store `bends`, quotas are targets: a region may use what the others leave free, and when all slots are
    taken the lowest sample of the region most above its target goes (of equals the region that holds most, then the
    one with the oldest sample). Otherwise no region ever holds more than its quota, as in the paper.

    >>> store = MemoryStore(np.array([1, 1]), bends=True)
    >>> def come(number, region, score):
    ...     batch = Batch(np.zeros((1, 2)), np.array([region]), np.array([number]))
    ...     return OfferResult(store.offer(batch, batch.y, np.array([score]), batch.ids).fates[0]).name
    >>> [come(1, 0, 0.9), come(2, 0, 0.8), come(3, 0, 0.7)]  # region 1 lends its slot
    ['KEPT', 'KEPT', 'REFUSED']
    >>> come(4, 1, 0.1)  # and takes it back
    'REPLACED'
    >>> store.stored().batch.ids.tolist()
    [1, 4]
    """

    def __init__(
        self, quotas: IntArray, after_use: AfterUse = AfterUse(), *, bends: bool = False
    ) -> None:
        self.after_use, self.bends, self.regions = after_use, bends, len(quotas)
        self._quotas: list[int] = quotas.tolist()
        self._entries: dict[int, _Entry] = {}
        self._ranked: list[list[_Entry]] = [[] for _ in quotas]
        """The samples of each region, the lowest key first."""
        self._samples: tuple[Batch, IntArray, IntArray] | None = None
        """What `stored` says of samples, regions and arrivals, until one of them changes."""

    def __len__(self) -> int:
        return len(self._entries)

    def configure(self, quotas: IntArray) -> list[int]:
        if len(quotas) != self.regions:
            raise ValueError(f"expected quotas for {self.regions} regions, got {len(quotas)}")
        self._quotas = quotas.tolist()
        dropped = []
        while self.bends and len(self._entries) > sum(self._quotas):
            dropped.append(self._drop(self._ranked[self._most_above()][0]))
        for ranked, quota in zip(self._ranked, self._quotas, strict=True):
            while not self.bends and len(ranked) > quota:
                dropped.append(self._drop(ranked[0]))
        return dropped

    def would_hold(self, counts: IntArray, quotas: IntArray) -> bool:
        """Whether so many samples of each region stay under these quotas."""
        return bool(counts.sum() <= quotas.sum() if self.bends else (counts <= quotas).all())

    def offer(self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray) -> Outcome:
        n = len(batch)
        outcome = Outcome(
            np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64), np.full(n, np.nan), scores
        )
        ways: dict[
            int, tuple[_Key, _Entry | None]
        ] = {}  # how to get in, by region, until something changes
        columns = (batch.ids, regions, scores, arrivals)
        for i, (id_, region, score, arrival) in enumerate(
            zip(*(c.tolist() for c in columns), strict=True)
        ):
            if region not in ways:
                ways[region] = self._way_in(region)
            to_beat, leaving = ways[region]
            entry = self._entries.get(id_)
            sound = score > -np.inf
            if entry is None and (not sound or (_RANKED, score, arrival) < to_beat):
                outcome.floors[i] = to_beat[1]
                continue
            ways.clear()
            if entry is None:
                outcome.fates[i] = OfferResult.KEPT if leaving is None else OfferResult.REPLACED
                if leaving is not None:
                    outcome.floors[i] = leaving.key[1]
                    outcome.displaced[i] = self._drop(leaving)
                self._insert(
                    _Entry(id_, batch.x[i].copy(), int(batch.y[i]), region, score, arrival)
                )
            elif sound:
                outcome.fates[i] = OfferResult.REFRESHED
                outcome.floors[i] = entry.key[1]
                entry.score, entry.arrival = score, arrival
                self._rekey(entry, (self.after_use.tier(entry.uses), score, arrival))
                if entry.uses and self.after_use.name == "discount":
                    self._rank(self._ranked[entry.region])
            else:
                outcome.displaced[i] = self._drop(entry)
        return outcome

    def stored(self) -> Stored:
        entries = self._by_arrival()
        if self._samples is None:
            x = np.stack([e.x for e in entries]) if entries else np.empty((0, 0), dtype=np.float32)
            batch = Batch(x, _ints([e.y for e in entries]), _ints([e.id for e in entries]))
            self._samples = (
                batch,
                _ints([e.region for e in entries]),
                _ints([e.arrival for e in entries]),
            )
        batch, regions, arrivals = self._samples
        scores = np.array([e.score for e in entries], dtype=np.float64)
        return Stored(batch, regions, scores, arrivals, _ints([e.uses for e in entries]))

    def revalue(self, scores: Scores) -> list[int]:
        dropped = []
        for entry, score in zip(self._by_arrival(), scores.tolist(), strict=True):
            entry.score = score
            if not score > -np.inf:
                dropped.append(self._drop(entry))
        for ranked in self._ranked:
            self._rank(ranked)
        return dropped

    def mark_used(self, ids: IntArray) -> None:
        for known in ids.tolist():
            if (entry := self._entries.get(known)) is not None:
                entry.uses += 1
        if self.after_use.name != "keep":
            for ranked in self._ranked:
                self._rank(ranked)

    def expire(self, before: int) -> None:
        for entry in [*self._entries.values()]:
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
        self._quotas = state["quotas"].tolist()
        self._entries, self._samples = {}, None
        self._ranked = [[] for _ in self._quotas]
        plain = ("ids", "y", "regions", "scores", "arrivals", "uses", "tiers", "effective")
        for x, id_, y, region, score, arrival, uses, tier, effective in zip(
            state["x"], *(state[name].tolist() for name in plain), strict=True
        ):
            entry = _Entry(id_, x.copy(), y, region, score, arrival)
            entry.uses, entry.key = uses, (tier, effective, arrival)
            self._insert(entry)

    def _way_in(self, region: int) -> tuple[_Key, _Entry | None]:
        """The key that a newcomer of the region must not be below, and what leaves for it; None while there is room."""
        held, slots = len(self._ranked[region]), self._quotas[region]
        if self.bends:
            held, slots = len(self._entries), sum(self._quotas)
        if held < slots:
            return _ROOM, None
        giver = self._most_above(region) if self.bends else region
        if not self._ranked[giver]:
            return _NO_ROOM, None
        lowest = self._ranked[giver][0]
        return lowest.key if giver == region else _ROOM, lowest

    def _most_above(self, newcomer: int | None = None) -> int:
        """The region most above its target, a newcomer counting as held; of equals the fullest, then the oldest."""
        held = [len(ranked) for ranked in self._ranked]
        if newcomer is not None:
            held[newcomer] += 1
        ranks = [(size - quota, size) for size, quota in zip(held, self._quotas, strict=True)]
        highest = max(ranks)
        level = [region for region, rank in enumerate(ranks) if rank == highest]
        if len(level) == 1:
            return level[0]
        return min(
            level, key=lambda region: min((e.arrival for e in self._ranked[region]), default=np.inf)
        )

    def _by_arrival(self) -> list[_Entry]:
        return sorted(self._entries.values(), key=attrgetter("arrival"))

    def _rank(self, ranked: list[_Entry]) -> None:
        """Gives every sample of a region the key that its score, its uses and `after_use` call for."""
        ranked.sort(key=attrgetter("score", "arrival"))
        scores = [e.score for e in ranked]
        discount = self.after_use.discount if self.after_use.name == "discount" else 0
        for place, entry in enumerate(ranked):
            lowered = place - discount * entry.uses
            effective = (
                scores[lowered] if lowered >= 0 else -np.inf
            )  # which ranks below every newcomer
            entry.key = (self.after_use.tier(entry.uses), effective, entry.arrival)
        ranked.sort(key=attrgetter("key"))

    def _rekey(self, entry: _Entry, key: _Key) -> None:
        self._drop(entry)
        entry.key = key
        self._insert(entry)

    def _insert(self, entry: _Entry) -> None:
        self._entries[entry.id] = entry
        self._samples = None
        insort(self._ranked[entry.region], entry, key=attrgetter("key"))

    def _drop(self, entry: _Entry) -> int:
        del self._entries[entry.id]
        self._samples = None
        ranked = self._ranked[entry.region]
        del ranked[ranked.index(entry, bisect_left(ranked, entry.key, key=attrgetter("key")))]
        return entry.id


def _ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
