"""A device's life: late or eager, cut any way, restarted anywhere."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.device import Device, DeviceOptions
from fedkeep.core.policies.fifo import Fifo
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.regions import LabelRegions
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.types import Assignment, Batch, LocalTraining, TrainOrder, Vector
from fedkeep.core.velocity import VelocityMeter
from fedkeep.learn.dense_learner import DenseLearner

LEARNER = DenseLearner((3, 4))
LOCAL = LocalTraining(0.1, 2)
PLAN = Assignment(np.array([2, 0, 1, 1]), np.array([1.0, 0.0, 2.0, 0.5]), 1.0)


def device_with(
    policy: SelectionPolicy = Ode(),
    plan: Assignment | None = PLAN,
    capacity: int = 4,
    **options: object,
) -> Device:
    device = Device(
        learner=LEARNER,
        policy=policy,
        store=MemoryStore(np.zeros(4, dtype=np.int64), AfterUse("evict_trained_first")),
        regions=LabelRegions(4),
        meter=VelocityMeter(4),
        capacity=capacity,
        sample_shape=(3,),
        labels=4,
        options=DeviceOptions(**options),  # type: ignore[arg-type]
        seed=5,
    )
    device.set_model(LEARNER.initial(0))
    if plan is not None:
        device.assign(plan)
    return device


def samples(n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 2 * n + 1, n)
    return Batch(rng.standard_normal((n, 3)).astype(np.float32), ids % 4, ids)


def order(round_: int, *, accepted: int | None = None) -> TrainOrder:
    return TrainOrder(round_, LEARNER.initial(round_), direction_of(round_), LOCAL, accepted)


def direction_of(round_: int) -> Vector:
    return np.random.default_rng(round_).standard_normal(LEARNER.gradient_size).astype(np.float32)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 4))
def test_late_equals_eager_and_a_restart_changes_nothing(cuts: list[int], restart_at: int) -> None:
    late, eager = device_with(), device_with()
    stream = samples(sum(cuts))
    for device in (late, eager):
        device.observe(samples(10, seed=9), 0.0)
        device.participate(order(1))
    late.observe(stream, 1.0)
    start = 0
    for i, cut in enumerate(cuts):
        eager.observe(stream.take(slice(start, start + cut)), 1.0)
        start += cut
        if i == restart_at:
            state = eager.snapshot()
            eager = device_with(plan=None)
            eager.restore(state)
    reports = [device.participate(order(2, accepted=1)) for device in (late, eager)]
    assert late.store.stored().batch.ids.tolist() == eager.store.stored().batch.ids.tolist()
    np.testing.assert_allclose(reports[0].model, reports[1].model, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        reports[0].local_gradient, reports[1].local_gradient, rtol=1e-4, atol=1e-6
    )  # type: ignore[arg-type]


def test_only_assigned_labels_are_stored_but_all_count_for_the_estimate() -> None:
    device, stream = device_with(), samples(40)
    device.observe(stream, 0.0)
    stored = device.store.stored().batch
    assert set(stored.y.tolist()) <= {0, 2, 3}
    report = device.participate(order(1))
    whole = LEARNER.probe(LEARNER.initial(0)).measure(stream).mean_gradient()
    assert report.gradient_samples == 40
    np.testing.assert_allclose(report.local_gradient, whole, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


def test_trains_by_equation_12() -> None:
    device = device_with()
    device.observe(samples(40), 0.0)
    stored = device.store.stored().batch
    gamma = PLAN.label_weights[stored.y]
    report = device.participate(order(1))
    model = LEARNER.initial(1).astype(np.float64)
    for _ in range(LOCAL.epochs):
        step = np.zeros(LEARNER.size)
        for i, weight in enumerate(gamma):
            one = LEARNER.probe(model.astype(np.float32)).measure(stored.take(slice(i, i + 1)))
            step += weight * one.mean_gradient()
        model -= LOCAL.learning_rate / gamma.sum() * step
    np.testing.assert_allclose(report.model, model, rtol=1e-4, atol=1e-5)
    assert report.weight == gamma.sum()
    assert report.steps == 2


def test_stored_samples_are_revalued_under_the_new_model_and_direction() -> None:
    device = device_with()
    device.observe(samples(40), 0.0)
    device.participate(order(1))
    stored = device.store.stored()
    expected = LEARNER.probe(LEARNER.initial(1)).measure(stored.batch).projections(direction_of(1))
    np.testing.assert_allclose(stored.scores, expected, rtol=1e-6)


def test_without_revaluation_only_the_first_direction_renews_the_scores() -> None:
    device = device_with(rescore=False)
    device.observe(samples(40), 0.0)
    device.participate(order(1))
    first = device.store.stored().scores
    device.participate(order(2))
    np.testing.assert_array_equal(device.store.stored().scores, first)


def test_an_empty_store_answers_no_data() -> None:
    report = device_with().participate(order(1))
    assert (report.weight, report.samples, report.steps, report.local_gradient) == (0.0, 0, 0, None)
    np.testing.assert_array_equal(report.model, LEARNER.initial(1))


def test_without_arrivals_the_last_estimate_is_kept_by_the_server_not_sent_as_zero() -> None:
    device = device_with()
    device.observe(samples(5), 0.0)
    device.participate(order(1))
    assert device.participate(order(2, accepted=1)).local_gradient is None


def test_a_lost_reply_loses_no_statistics() -> None:
    device = device_with()
    device.observe(samples(5), 0.0)
    sent = device.participate(order(1)).local_gradient
    again = device.participate(order(2, accepted=None)).local_gradient
    np.testing.assert_array_equal(sent, again)  # type: ignore[arg-type]


def test_the_same_order_twice_uses_the_samples_once() -> None:
    device = device_with()
    device.observe(samples(20), 0.0)
    first = device.participate(order(1))
    second = device.participate(order(1))
    assert set(device.store.stored().uses.tolist()) == {1}
    np.testing.assert_array_equal(first.model, second.model)


def test_bad_samples_are_refused_and_counted() -> None:
    device = device_with()
    batch = samples(6)
    bad = Batch(batch.x.copy(), batch.y.copy(), batch.ids)
    bad.x[0, 0] = np.nan
    bad.y[1] = 17
    _, refused = device.observe(bad, 0.0)
    assert refused == {"label": 1, "not-finite": 1}
    assert device.participate(order(1)).gradient_samples == 4


def test_whole_numbers_written_as_floats_are_labels() -> None:
    one, other = device_with(Ode()), device_with(Ode())
    batch = samples(10)
    one.observe(batch, 0.0)
    other.observe(Batch(batch.x, batch.y.astype(np.float64), batch.ids), 0.0)  # type: ignore[arg-type]
    assert other.store.stored().batch.ids.tolist() == one.store.stored().batch.ids.tolist()
    assert other.profile().velocity.tolist() == one.profile().velocity.tolist()


def test_before_a_plan_a_reservoir_balanced_over_the_labels_seen() -> None:
    rng = np.random.default_rng(0)
    y = np.concatenate([np.zeros(50), rng.choice(4, 50, p=[0.7, 0.1, 0.1, 0.1])]).astype(np.int64)
    batch = Batch(rng.standard_normal((100, 3)).astype(np.float32), y, np.arange(100))
    whole, parts = device_with(plan=None, capacity=8), device_with(plan=None, capacity=8)
    whole.observe(batch, 0.0)
    for i in range(100):
        parts.observe(batch.take(slice(i, i + 1)), 0.0)
    stored = whole.store.stored().batch
    assert np.bincount(stored.y).tolist() == [5, 1, 1, 1]  # by the root of the shares
    assert stored.ids.tolist() == parts.store.stored().batch.ids.tolist()


def test_the_profile_is_what_the_meter_measured() -> None:
    device = device_with()
    device.observe(samples(12), 0.0)
    profile = device.profile()
    assert profile.capacity == 4
    np.testing.assert_array_equal(profile.velocity, np.bincount(samples(12).y, minlength=4))


def test_old_samples_make_way_for_any_newcomer() -> None:
    device = device_with(Fifo(), max_age=5)
    device.observe(samples(30), 0.0)
    device.participate(order(1))
    old = set(device.store.stored().batch.ids.tolist())
    device.observe(samples(30, seed=4), 1.0)
    assert not old & set(device.store.stored().batch.ids.tolist())


def test_an_unbounded_policy_keeps_everything() -> None:
    from fedkeep.core.policies.full_data import FullData

    device = device_with(FullData())
    device.observe(samples(30), 0.0)
    assert len(device.store.stored().batch) == len(set(samples(30).ids.tolist()))


def test_what_arrives_during_training_has_not_been_trained_on() -> None:
    device = device_with(Fifo())
    first = Batch(np.ones((1, 3), dtype=np.float32), np.array([2]), np.array([7]))
    late = Batch(np.ones((1, 3), dtype=np.float32), np.array([3]), np.array([8]))
    device.observe(first, 0.0)
    job = device.prepare(order(1))
    device.observe(late, 1.0)
    device.complete(job, LEARNER.initial(1))
    stored = device.store.stored()
    assert dict(zip(stored.batch.ids.tolist(), stored.uses.tolist(), strict=True)) == {7: 1, 8: 0}
