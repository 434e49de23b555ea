"""The store against a naive one, and its invariants."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.protocols import OfferResult, Outcome
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.types import Batch

REGIONS = 3


@dataclass
class Arrival:
    id: int
    region: int
    score: float


def batch_of(arrivals: list[Arrival]) -> Batch:
    ids = np.array([a.id for a in arrivals], dtype=np.int64)
    return Batch(
        ids[:, None].astype(np.float32), np.array([a.region for a in arrivals], dtype=np.int64), ids
    )


def offer(store: MemoryStore, arrivals: list[Arrival], first: int) -> Outcome:
    return store.offer(
        batch_of(arrivals),
        np.array([a.region for a in arrivals], dtype=np.int64),
        np.array([a.score for a in arrivals], dtype=np.float64),
        first + np.arange(len(arrivals)),
    )


def offer_in_pieces(store: MemoryStore, stream: list[Arrival], cuts: list[int], most: int) -> None:
    """Offers a stream cut into batches; at no time does the store hold more than `most`."""
    start = 0
    while start < len(stream):
        cut = cuts[start % len(cuts)]
        offer(store, stream[start : start + cut], start)
        start += cut
        assert len(store) <= most


class NaiveStore:
    """The rules in the plainest words: one list, sorted at every step."""

    def __init__(self, quotas: list[int]) -> None:
        self.quotas = quotas
        self.held: dict[int, tuple[float, int, int]] = {}

    def offer(self, arrival: Arrival, number: int) -> None:
        self.held.pop(arrival.id, None) if arrival.score == -np.inf else None
        if arrival.score == -np.inf:
            return
        mates = [
            i
            for i, (_, _, region) in self.held.items()
            if region == arrival.region and i != arrival.id
        ]
        if arrival.id in self.held or len(mates) < self.quotas[arrival.region]:
            self.held[arrival.id] = (arrival.score, number, arrival.region)
        elif mates:
            lowest = min(mates, key=lambda i: self.held[i])
            if self.held[lowest][0] <= arrival.score:
                del self.held[lowest]
                self.held[arrival.id] = (arrival.score, number, arrival.region)


scores = st.one_of(st.integers(-3, 3).map(float), st.just(-np.inf))
streams = st.lists(
    st.builds(lambda id_, score: Arrival(id_, id_ % REGIONS, score), st.integers(0, 25), scores),
    max_size=60,
)
quotas_lists = st.lists(st.integers(0, 4), min_size=REGIONS, max_size=REGIONS)


@given(streams, quotas_lists, st.lists(st.integers(1, 17), min_size=1))
def test_keeps_what_a_naive_store_keeps_however_the_stream_is_cut(
    stream: list[Arrival], quotas: list[int], cuts: list[int]
) -> None:
    naive, store = NaiveStore(quotas), MemoryStore(np.array(quotas))
    for number, arrival in enumerate(stream):
        naive.offer(arrival, number)
    offer_in_pieces(store, stream, cuts, most=sum(quotas))
    stored = store.stored()
    kept = dict(
        zip(
            stored.batch.ids.tolist(),
            zip(stored.scores, stored.arrivals, stored.regions, strict=True),
            strict=True,
        )
    )
    assert kept == naive.held
    assert (np.bincount(stored.regions, minlength=REGIONS) <= quotas).all()


@given(
    streams,
    quotas_lists,
    st.sampled_from(["keep", "discount", "evict_trained_first"]),
    st.integers(0, 59),
)
def test_a_restart_anywhere_changes_nothing(
    stream: list[Arrival], quotas: list[int], rule: str, at: int
) -> None:
    def play(*, restart: bool) -> list[int]:
        store = MemoryStore(np.array(quotas), AfterUse(rule))  # type: ignore[arg-type]
        offer(store, stream[:at], 0)
        store.mark_used(store.stored().batch.ids)
        offer(store, stream[at : at + 5], at)
        if restart:
            state = store.snapshot()
            store = MemoryStore(np.zeros(REGIONS, dtype=np.int64), AfterUse(rule))  # type: ignore[arg-type]
            store.restore(state)
        offer(store, stream[at + 5 :], at + 5)
        return store.stored().batch.ids.tolist()

    assert play(restart=True) == play(restart=False)


@given(
    st.lists(st.integers(0, 12), max_size=40),
    st.integers(0, 5),
    st.lists(st.integers(1, 17), min_size=1),
)
def test_a_queue_says_of_each_sample_what_it_says_of_one_at_a_time(
    ids: list[int], slots: int, cuts: list[int]
) -> None:
    stream = [Arrival(id_, 0, float(number)) for number, id_ in enumerate(ids)]
    whole, single = (MemoryStore(np.array([slots])) for _ in range(2))
    start = 0
    while start < len(stream):
        cut = cuts[start % len(cuts)]
        together = offer(whole, stream[start : start + cut], start)
        alone = [offer(single, [each], start + i) for i, each in enumerate(stream[start:][:cut])]
        for name in ("results", "evicted", "thresholds", "scores"):
            found = getattr(together, name)
            np.testing.assert_equal(found, np.concatenate([getattr(o, name) for o in alone]))
        start += cut
    assert whole.stored().batch.ids.tolist() == single.stored().batch.ids.tolist()


def test_the_newest_wins_ties() -> None:
    store = MemoryStore(np.array([2]))
    offer(store, [Arrival(1, 0, 5.0), Arrival(2, 0, 5.0), Arrival(3, 0, 5.0)], 0)
    assert store.stored().batch.ids.tolist() == [2, 3]


def test_tells_what_became_of_each_offer() -> None:
    store = MemoryStore(np.array([1]))
    outcome = offer(
        store, [Arrival(1, 0, 1.0), Arrival(2, 0, 3.0), Arrival(3, 0, 2.0), Arrival(2, 0, 2.5)], 0
    )
    assert outcome.results.tolist() == [
        OfferResult.KEPT,
        OfferResult.REPLACED,
        OfferResult.REFUSED,
        OfferResult.REFRESHED,
    ]
    assert outcome.evicted.tolist() == [-1, 1, -1, -1]
    assert np.isnan(outcome.thresholds[0])
    assert outcome.thresholds[1] == 1.0


def test_a_stored_sample_that_is_refused_when_it_comes_again_leaves_and_is_named() -> None:
    store = MemoryStore(np.array([2]))
    offer(store, [Arrival(1, 0, 1.0), Arrival(2, 0, 3.0)], 0)
    outcome = offer(store, [Arrival(1, 0, -np.inf), Arrival(5, 0, -np.inf)], 2)
    assert (outcome.results.tolist(), outcome.evicted.tolist()) == (
        [OfferResult.REFUSED] * 2,
        [1, -1],
    )
    assert store.stored().batch.ids.tolist() == [2]


def test_tells_the_score_of_each_offer() -> None:
    store = MemoryStore(np.array([1, 1, 1]))
    parts = [offer(store, [Arrival(0, 0, 2.0)], 0), offer(store, [Arrival(3, 0, 1.0)], 1)]
    assert Outcome.concatenate(parts).scores.tolist() == [2.0, 1.0]


def test_a_refreshed_sample_that_fell_gives_way_within_the_same_batch() -> None:
    store = MemoryStore(np.array([1]))
    offer(store, [Arrival(1, 0, 9.0)], 0)
    outcome = offer(store, [Arrival(2, 0, 5.0), Arrival(1, 0, 1.0), Arrival(3, 0, 5.0)], 1)
    assert outcome.results.tolist() == [
        OfferResult.REFUSED,
        OfferResult.REFRESHED,
        OfferResult.REPLACED,
    ]


def test_evict_trained_first_evicts_the_lowest_used_sample_and_no_unused_one() -> None:
    store = MemoryStore(np.array([2]), AfterUse("evict_trained_first"))
    offer(store, [Arrival(1, 0, 9.0), Arrival(2, 0, 8.0)], 0)
    store.mark_used(store.stored().batch.ids)
    offer(store, [Arrival(3, 0, -5.0)], 2)
    assert store.stored().batch.ids.tolist() == [1, 3]
    offer(store, [Arrival(4, 0, -7.0)], 3)
    assert store.stored().batch.ids.tolist() == [3, 4], "the other used one goes next"
    offer(store, [Arrival(5, 0, -9.0)], 4)
    assert store.stored().batch.ids.tolist() == [3, 4], "unused ones rank by score"


def test_discount_lowers_the_rank_by_uses_and_works_on_negative_scores() -> None:
    store = MemoryStore(np.array([3]), AfterUse("discount", 1))
    offer(store, [Arrival(1, 0, -1.0), Arrival(2, 0, -2.0), Arrival(3, 0, -3.0)], 0)
    store.mark_used(store.stored().batch.ids)
    outcome = offer(store, [Arrival(4, 0, -50.0)], 3)
    assert outcome.evicted.tolist() == [3], "one use puts the lowest below every newcomer"
    outcome = offer(store, [Arrival(5, 0, -2.5)], 4)
    assert outcome.evicted.tolist() == [4]
    outcome = offer(store, [Arrival(6, 0, -2.6)], 5)
    assert outcome.evicted.tolist() == [2], (
        "a sample of -2 used once counts as the next lower one, -3"
    )


def test_expired_samples_make_way() -> None:
    store = MemoryStore(np.array([2]))
    offer(store, [Arrival(1, 0, 9.0), Arrival(2, 0, 8.0)], 0)
    store.expire(before=1)
    offer(store, [Arrival(3, 0, -1.0)], 2)
    assert store.stored().batch.ids.tolist() == [2, 3]


def test_an_expired_sample_that_comes_again_is_young_again_even_if_it_was_trained_on() -> None:
    store = MemoryStore(np.array([1]))
    offer(store, [Arrival(1, 0, 5.0)], 0)
    store.mark_used(store.stored().batch.ids)
    store.expire(before=1)
    offer(store, [Arrival(1, 0, 5.0), Arrival(2, 0, 0.0)], 1)
    assert store.stored().batch.ids.tolist() == [1]


def test_a_smaller_quota_drops_the_lowest() -> None:
    store = MemoryStore(np.array([3]))
    offer(store, [Arrival(1, 0, 3.0), Arrival(2, 0, 1.0), Arrival(3, 0, 2.0)], 0)
    assert store.configure(np.array([2])) == [2]
    assert store.stored().batch.ids.tolist() == [1, 3]


def test_revaluing_with_minus_infinity_drops() -> None:
    store = MemoryStore(np.array([3]))
    offer(store, [Arrival(1, 0, 3.0), Arrival(2, 0, 1.0)], 0)
    assert store.rescore(np.array([-np.inf, 4.0])) == [1]
    stored = store.stored()
    assert stored.batch.ids.tolist() == [2]
    assert stored.scores.tolist() == [4.0]


def test_the_store_keeps_its_own_copy() -> None:
    store = MemoryStore(np.array([1]))
    batch = batch_of([Arrival(1, 0, 1.0)])
    store.offer(batch, np.zeros(1, dtype=np.int64), np.ones(1), np.zeros(1, dtype=np.int64))
    batch.x[:] = 99
    assert store.stored().batch.x.tolist() == [[1.0]]


class NaiveBendingStore:
    """Soft quotas, naively: every sample enters, and the region most above its quota loses one."""

    def __init__(self, quotas: list[int]) -> None:
        self.quotas = quotas
        self.held: dict[int, tuple[float, int, int]] = {}

    def offer(self, arrival: Arrival, number: int) -> None:
        if arrival.score == -np.inf:
            self.held.pop(arrival.id, None)
            return
        self.held[arrival.id] = (arrival.score, number, arrival.region)
        if len(self.held) > sum(self.quotas):
            del self.held[self._victim()]

    def _victim(self) -> int:
        members = [
            [i for i, (_, _, r) in self.held.items() if r == region] for region in range(REGIONS)
        ]
        excess = [(len(m) - q, len(m)) for m, q in zip(members, self.quotas, strict=True)]
        level = [r for r in range(REGIONS) if excess[r] == max(excess)]
        giver = min(level, key=lambda r: min(self.held[i][1] for i in members[r]))
        return min(members[giver], key=lambda i: self.held[i])


@given(streams, quotas_lists, st.lists(st.integers(1, 17), min_size=1))
def test_a_bending_store_keeps_what_a_naive_one_keeps_however_the_stream_is_cut(
    stream: list[Arrival], quotas: list[int], cuts: list[int]
) -> None:
    naive, store = NaiveBendingStore(quotas), MemoryStore(np.array(quotas), soft_quotas=True)
    for number, arrival in enumerate(stream):
        naive.offer(arrival, number)
    offer_in_pieces(store, stream, cuts, most=sum(quotas))
    stored = store.stored()
    assert dict(zip(stored.batch.ids.tolist(), stored.scores.tolist(), strict=True)) == {
        i: score for i, (score, _, _) in naive.held.items()
    }


def test_a_region_that_lost_its_oldest_sample_may_take_from_another_within_the_same_batch() -> None:
    store = MemoryStore(np.array([1, 1, 1]), soft_quotas=True)
    offer(store, [Arrival(0, 0, 0.5), Arrival(1, 1, 0.9), Arrival(2, 1, 0.8)], 0)
    outcome = offer(store, [Arrival(3, 0, 0.6), Arrival(4, 0, 0.1)], 3)
    assert outcome.evicted.tolist() == [0, 2]
    assert store.stored().batch.ids.tolist() == [1, 3, 4]


def test_a_store_with_fewer_slots_shrinks_from_the_region_most_above_its_target() -> None:
    store = MemoryStore(np.array([1, 3, 0]), soft_quotas=True)
    offer(store, [Arrival(i, 0, float(i)) for i in range(0, 9, 3)] + [Arrival(1, 1, 0.0)], 0)
    assert store.configure(np.array([1, 1, 0])) == [0, 3]
    assert sorted(store.stored().batch.ids.tolist()) == [1, 6]
