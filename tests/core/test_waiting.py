"""The waiting room: who waits, who leaves, and what a label does when it comes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.config.device import build_device
from fedkeep.config.method import parse_method
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import OfferResult
from fedkeep.core.types import Batch, LocalTraining, TrainOrder
from fedkeep.core.waiting import Departure, LabelResult, WaitingOptions, WaitingRoom
from fedkeep.learn.dense_learner import DenseLearner

LEARNER = DenseLearner((4, 3))
KEPT, REFUSED, REPLACED = OfferResult.KEPT, OfferResult.REFUSED, OfferResult.REPLACED


def room(rule: Any = "oldest", slots: int = 2, **options: Any) -> WaitingRoom:
    return WaitingRoom(WaitingOptions(0.5, rule, **options), slots, labels=3, seed=1)


def offered(to: WaitingRoom, ids: list[int], scores: Any = None) -> list[OfferResult]:
    x = np.array(ids, dtype=np.float32)[:, None]
    return to.offer(x, np.array(ids), None if scores is None else np.array(scores, dtype=float))


def device(share: float = 0.5, capacity: int = 8, **tables: Any) -> Device:
    waiting = {"share": share, **tables.pop("waiting", {})}
    method = parse_method({"policy": {"name": "balanced-reservoir"}, "waiting": waiting, **tables})
    made = build_device(
        method, LEARNER, capacity=capacity, sample_shape=(4,), labels=3, seed=3, draw_seed=5
    )
    made.set_model(LEARNER.initial(0))
    return made


def samples(count: int, first: int = 0) -> Batch:
    ids = np.arange(first, first + count)
    x = np.random.default_rng(7).standard_normal((first + count, 4)).astype(np.float32)[first:]
    return Batch(x, ids % 3, ids)


def order(round_: int) -> TrainOrder:
    return TrainOrder(round_, LEARNER.initial(round_), None, LocalTraining(0.1, 2))


def test_the_oldest_wait_until_they_leave() -> None:
    waiting = room()
    assert offered(waiting, [5, 6, 7]) == [KEPT, KEPT, REFUSED]
    waiting.leave(np.array([5]), Departure.LABELLED)
    assert offered(waiting, [8, 9]) == [KEPT, REFUSED]
    assert waiting.ids.tolist() == [6, 8]


def test_the_newest_wait_by_that_rule() -> None:
    waiting = room("newest")
    assert offered(waiting, [5, 6, 7]) == [KEPT, KEPT, REPLACED]
    assert waiting.ids.tolist() == [6, 7]
    assert waiting.counts["displaced"] == 1


def test_a_label_with_most_gives_way_to_one_with_two_fewer_and_to_no_other() -> None:
    waiting = room("balanced", slots=4)
    a, b, c = [0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]
    assert offered(waiting, [1, 2, 3, 4], [a, a, a, b]) == [KEPT] * 4
    assert offered(waiting, [5], [c]) == [REPLACED]  # three of a: 3 >= 0 + 2
    assert offered(waiting, [6], [c]) in ([REFUSED], [REPLACED])  # 2 < 1 + 2: within its own
    held = waiting.ids.tolist()
    assert 4 in held
    assert (5 in held) != (6 in held)


def test_the_most_uncertain_wait() -> None:
    waiting = room("uncertain", slots=1)
    sure, torn = [0.9, 0.05, 0.05], [0.4, 0.39, 0.21]
    assert offered(waiting, [1], [sure]) == [KEPT]
    assert offered(waiting, [2], [torn]) == [REPLACED]
    assert offered(waiting, [3], [sure]) == [REFUSED]


def test_a_sample_that_waits_and_comes_again_changes_nothing() -> None:
    waiting = room()
    offered(waiting, [5])
    assert offered(waiting, [5, 6]) == [OfferResult.REFRESHED, KEPT]
    assert len(waiting) == 2


def test_samples_expire_by_arrivals_and_are_counted() -> None:
    waiting = room(max_age=2)
    offered(waiting, [5, 6, 7])
    assert waiting.ids.tolist() == [5, 6]
    assert offered(waiting, [8]) == [KEPT]  # 5 came three arrivals before
    assert waiting.ids.tolist() == [6, 8]
    assert waiting.counts["expired"] == 1


def test_by_default_a_sample_that_waits_too_long_gives_way_once_its_slot_is_wanted() -> None:
    waiting = room(slots=6)
    offered(waiting, [1, 2, 3])
    waiting.leave(np.array([1]), Departure.LABELLED)  # three arrivals after it came
    offered(waiting, [4, 5, 6, 7])
    assert waiting.ids.tolist() == [2, 3, 4, 5, 6, 7]
    assert offered(waiting, [8]) == [REFUSED]  # 2 came six arrivals before, which is not too long
    assert offered(waiting, [9]) == [KEPT]
    assert waiting.ids.tolist() == [3, 4, 5, 6, 7, 9]
    free = room(slots=20)
    offered(free, [1, 2, 3])
    free.leave(np.array([1]), Departure.LABELLED)
    offered(free, [*range(10, 20)])
    assert 2 in free, "there was room for all"
    never = room(slots=9, max_age=0)
    offered(never, [1, 2])
    never.leave(np.array([1]), Departure.LABELLED)
    offered(never, [*range(10, 17)])
    assert 2 in never


def test_early_labels_are_bounded_and_the_oldest_are_forgotten() -> None:
    waiting = room(early_labels=2)
    assert all(waiting.remember(id_, 1) for id_ in (1, 2, 3))
    assert list(waiting.early) == [2, 3]
    assert waiting.counts["early_lost"] == 1
    assert not room(early_labels=0).remember(1, 1)


@settings(deadline=None, max_examples=60)
@given(
    rule=st.sampled_from(["random", "balanced", "uncertain", "newest", "oldest"]),
    ids=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    cut=st.integers(0, 40),
    slots=st.integers(1, 6),
    max_age=st.sampled_from([None, 1, 5]),
)
def test_neither_cuts_nor_a_restart_matter(
    rule: Any, ids: list[int], cut: int, slots: int, max_age: int | None
) -> None:
    scores = np.random.default_rng(1).dirichlet(np.ones(3), 31)

    def predict(x: Any) -> Any:
        return scores[x[:, 0].astype(int)]

    whole, cuts = room(rule, slots, max_age=max_age), room(rule, slots, max_age=max_age)
    offered(whole, ids, scores[ids])
    offered(cuts, ids[:cut], scores[ids[:cut]]) if ids[:cut] else None
    again = room(rule, slots, max_age=max_age)
    again.restore(cuts.snapshot())
    again.rank(predict)
    offered(again, ids[cut:], scores[ids[cut:]]) if ids[cut:] else None
    assert again.ids.tolist() == whole.ids.tolist()
    assert len(whole) <= slots
    assert again.counts == whole.counts


def test_waiting_takes_its_slots_from_the_store() -> None:
    made = device(0.25, capacity=8)
    assert made.waiting is not None
    assert (made.capacity, made.waiting.slots, made.profile().capacity) == (6, 2, 6)
    came = samples(60)
    for start in range(0, 60, 6):
        part = came.take(slice(start, start + 6))
        made.wait(part.x[:3], part.ids[:3], 0.0)
        made.observe(part.take(slice(3, 6)), 0.0)
        assert len(made.store.stored().batch) + len(made.waiting) <= 8


def test_a_sample_counts_when_its_label_comes() -> None:
    late, timely, came = device(), device(), samples(4)
    late.wait(came.x, came.ids, 0.0)
    assert late.window.count == 0
    assert late.selection.frequencies.values().sum() == 0
    for made in (late, timely):
        made.set_model(LEARNER.initial(1))  # measured under the model of then
    assert [r for r, _ in late.label(came.ids, came.y, 0.0)] == [LabelResult.LABELLED] * 4
    timely.observe(came, 0.0)
    assert late.store.stored().batch.ids.tolist() == timely.store.stored().batch.ids.tolist()
    np.testing.assert_allclose(late.window.mean(), timely.window.mean(), rtol=1e-6)
    assert late.window.counts.tolist() == timely.window.counts.tolist()
    assert late.meter.velocity().tolist() == timely.meter.velocity().tolist()
    assert late.waiting is not None
    assert len(late.waiting) == 0


def test_a_correction_changes_the_store_and_no_sum() -> None:
    made, came = device(), samples(3)
    made.observe(came, 0.0)
    sums, shares = made.window.mean(), made.selection.frequencies.values()
    [(result, fate)] = made.label(np.array([1]), np.array([2]), 0.0)
    assert (result, fate) == (LabelResult.CORRECTED, None)
    stored = made.store.stored()
    assert stored.batch.y.tolist() == stored.regions.tolist() == [0, 2, 2]
    assert made.window.mean().tolist() == sums.tolist()
    assert made.selection.frequencies.values().tolist() == shares.tolist()
    assert made.label(np.array([1]), np.array([2]), 0.0) == [(LabelResult.KNOWN, None)]


def test_a_corrected_sample_is_scored_under_its_new_label() -> None:
    made = device(policy={"name": "high-loss"})
    came = samples(2)
    made.observe(came, 0.0)
    made.label(np.array([0]), np.array([1]), 0.0)
    other = Batch(came.x[:1], np.array([1]), came.ids[:1])
    assert made.probe is not None
    assert made.store.stored().scores[0] == pytest.approx(made.probe.measure(other).losses()[0])


@pytest.mark.parametrize("quotas", ["soft", "hard"])
def test_a_correction_keeps_to_the_slots(quotas: str) -> None:
    made = device(capacity=6, share=0.5, storage={"quotas": quotas})
    made.observe(samples(30), 0.0)
    before = len(made.store.stored().batch)
    ids = made.store.stored().batch.ids
    made.label(ids, np.full(len(ids), 0), 0.0)
    assert len(made.store.stored().batch) <= before <= made.capacity


def test_a_label_before_its_sample_makes_it_an_arrival() -> None:
    made, came = device(), samples(2)
    assert made.label(came.ids[:1], came.y[:1], 0.0) == [(LabelResult.EARLY, None)]
    assert made.wait(came.x, came.ids, 0.0) == [(KEPT, True), (KEPT, False)]
    assert made.window.count == 1
    assert made.waiting is not None
    assert made.waiting.early == {}


def test_a_label_for_nothing_is_unknown_without_a_room() -> None:
    made = device(0.0)
    assert made.waiting is None
    assert made.label(np.array([4]), np.array([1]), 0.0) == [(LabelResult.UNKNOWN, None)]


def test_a_sample_that_waits_and_comes_with_its_label_waits_no_longer() -> None:
    made, came = device(), samples(1)
    made.wait(came.x, came.ids, 0.0)
    made.observe(came, 0.0)
    assert made.waiting is not None
    assert (len(made.waiting), len(made.store.stored().batch)) == (0, 1)


def test_every_sample_enters_one_window_however_its_label_came() -> None:
    made, entered = device(), list[int]()
    made.entering = lambda ids: entered.extend(ids.tolist())
    came = samples(6)
    made.wait(came.x[:4], came.ids[:4], 0.0)
    assert entered == []
    made.label(came.ids[:2], came.y[:2], 0.0)
    made.label(came.ids[:2], (came.y[:2] + 1) % 3, 0.0)  # corrected
    made.participate(order(1))
    made.label(came.ids[:4], came.y[:4], 0.0)
    assert sorted(entered) == [0, 1, 2, 3]


def test_pseudo_labels_count_at_once_and_are_corrected_by_true_ones() -> None:
    made, came = device(waiting={"pseudo_labels": 0.01}), samples(3)
    results = made.wait(came.x, came.ids, 0.0)
    assert [stored for _, stored in results] == [True] * 3
    predicted = LEARNER.logits(LEARNER.initial(0), came.x).argmax(axis=1)
    assert made.store.stored().batch.y.tolist() == predicted.tolist()
    made.label(came.ids, (predicted + 1) % 3, 0.0)
    assert made.store.stored().batch.y.tolist() == ((predicted + 1) % 3).tolist()
    assert made.window.count == 3


def test_a_new_model_may_be_sure_of_what_waits() -> None:
    made, came = device(waiting={"pseudo_labels": 0.9999}), samples(4)
    made.wait(came.x, came.ids, 0.0)
    assert made.waiting is not None
    assert len(made.waiting) == 4
    asked = order(1)
    asked.model[:] *= 1e8
    made.participate(asked)
    assert len(made.waiting) == 0
    assert len(made.store.stored().batch) == 4


def test_a_snapshot_has_all_that_waits() -> None:
    made, came = device(), samples(9)
    made.wait(came.x[:6], came.ids[:6], 0.0)
    made.label(np.array([8]), np.array([1]), 0.0)
    again = device()
    again.restore(made.snapshot())
    assert made.waiting is not None
    assert again.waiting is not None
    assert again.waiting.ids.tolist() == made.waiting.ids.tolist()
    assert again.waiting.early == made.waiting.early
    for one in (made, again):
        one.wait(came.x[6:], came.ids[6:], 0.0)
        one.label(came.ids, came.y, 0.0)
    first, second = made.store.stored(), again.store.stored()
    assert first.batch.ids.tolist() == second.batch.ids.tolist()
    assert first.scores.tolist() == second.scores.tolist()


def test_a_policy_that_keeps_everything_has_no_waiting_room() -> None:
    with pytest.raises(ConfigError, match=r"keeps everything.*leave \[waiting\] out"):
        parse_method({"policy": {"name": "full-data"}, "waiting": {"share": 0.5}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.0}, "share must be at least 0 and below 1"),
        ({"rule": "fairest"}, "rule"),
        ({"pseudo_labels": 0.9}, "set share above 0"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_method({"waiting": options})
