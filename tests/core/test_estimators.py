"""Eq. 7 and 8 on hand numbers, and what must never stay in a sum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.gradients import (
    Estimate,
    GradientAccumulator,
    IncrementalEstimator,
    LocalGradientEstimator,
    RoundMeanEstimator,
)
from fedkeep.core.types import Batch, Vector
from fedkeep.learn.dense_learner import DenseLearner

LEARNER = DenseLearner((4, 3))
MODEL = LEARNER.initial(0)


def samples(n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        rng.standard_normal((n, 4)).astype(np.float32), rng.integers(0, 3, n), np.arange(n)
    )


def vector(*numbers: float) -> Vector:
    return np.array(numbers, dtype=np.float32)


class WindowedEstimator:
    """An estimator with its window, as a device has them."""

    def __init__(self) -> None:
        self.window, self.estimator = (
            GradientAccumulator(LEARNER.gradient_size, 3),
            LocalGradientEstimator(),
        )

    def observe(self, batch: Batch, model: Vector = MODEL) -> None:
        self.window.add(LEARNER.probe(model).measure(batch), batch.y)

    def freeze(self, round_: int) -> tuple[Vector | None, int]:
        sent = self.estimator.freeze(self.window, round_)
        self.window.clear()
        return sent


def test_the_local_estimate_is_the_running_mean_of_equation_7() -> None:
    batch, estimator = samples(9), WindowedEstimator()
    running = np.zeros(LEARNER.gradient_size)
    for n in range(1, 10):
        one = batch.take(slice(n - 1, n))
        gradient = LEARNER.probe(MODEL).measure(one).mean_gradient()
        running = (n - 1) / n * running + gradient / n
        estimator.observe(one)
    sent, count = estimator.freeze(0)
    assert count == 9
    np.testing.assert_allclose(sent, running, rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_the_local_estimate_does_not_depend_on_chunking(cuts: list[int]) -> None:
    batch = samples(sum(cuts))
    whole, parts = (WindowedEstimator() for _ in range(2))
    whole.observe(batch)
    start = 0
    for cut in cuts:
        parts.observe(batch.take(slice(start, start + cut)))
        start += cut
    np.testing.assert_allclose(whole.freeze(0)[0], parts.freeze(0)[0], rtol=1e-5, atol=1e-6)


def test_pending_is_sent_until_its_round_is_accepted() -> None:
    estimator = WindowedEstimator()
    estimator.observe(samples(5))
    first, _ = estimator.freeze(1)
    estimator.estimator.settle(accepted_round=None)
    again, count = estimator.freeze(2)
    assert first is again
    assert count == 5
    estimator.estimator.settle(accepted_round=2)
    assert estimator.freeze(3) == (None, 0)


def test_an_unaccepted_estimate_yields_only_to_one_over_as_many_arrivals() -> None:
    estimator = WindowedEstimator()
    estimator.observe(samples(5))
    estimator.freeze(1)
    estimator.observe(samples(2, seed=1))
    assert estimator.freeze(2)[1] == 5
    estimator.observe(samples(6, seed=2))
    assert estimator.freeze(3)[1] == 6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_sample_too_large_to_measure_silences_a_device_for_one_window_only() -> None:
    estimator = WindowedEstimator()
    huge = samples(20)
    huge.x[3] = [3e38, -3e38, 3e38, -3e38]
    estimator.observe(huge, 1000 * MODEL)
    sent, count = estimator.freeze(0)
    assert sent is None
    assert count == 0
    estimator.observe(samples(5))
    sent, count = estimator.freeze(1)
    assert count == 5
    assert sent is not None
    assert np.isfinite(sent).all()


def test_the_local_estimator_survives_a_restart() -> None:
    estimator, other = (WindowedEstimator() for _ in range(2))
    estimator.observe(samples(4))
    estimator.freeze(7)
    estimator.observe(samples(3, seed=1))
    for mine, its in ((estimator.window, other.window), (estimator.estimator, other.estimator)):
        its.restore(mine.snapshot())
        for name, array in mine.snapshot().items():
            np.testing.assert_array_equal(array, its.snapshot()[name])


def test_each_gradient_is_clipped_before_the_mean() -> None:
    batch = samples(20)
    batch.x[3] = 1e4
    clipped = GradientAccumulator(LEARNER.gradient_size, 3, clip=0.5)
    clipped.add(LEARNER.probe(MODEL).measure(batch), batch.y)
    singles = [
        LEARNER.probe(MODEL).measure(batch.take(slice(i, i + 1))).mean_gradient() for i in range(20)
    ]
    short = [g * min(1.0, 0.5 / float(np.linalg.norm(g))) for g in singles]
    np.testing.assert_allclose(clipped.mean(), np.mean(short, axis=0), rtol=1e-4, atol=1e-6)


def test_the_global_estimate_is_the_running_sum_of_equation_8_over_the_covered_weight() -> None:
    zeta = {1: 0.5, 2: 0.3, 3: 0.2}
    last = {device: vector(0, 0) for device in zeta}
    running, covered = np.zeros(2), set()
    estimator = IncrementalEstimator()
    rng = np.random.default_rng(0)
    for round_ in range(12):
        news = {
            int(d): rng.standard_normal(2).astype(np.float32)
            for d in rng.choice([1, 2, 3], 2, replace=False)
        }
        for device, gradient in news.items():
            running += zeta[device] * (gradient - last[device])
            last[device] = gradient
            covered.add(device)
        estimator.update({d: Estimate(g, zeta[d], round_) for d, g in news.items()})
        direction = estimator.direction()
        assert direction is not None
        np.testing.assert_allclose(
            direction * sum(zeta[d] for d in covered), running, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("devices", [1, 31, 33, 1100])
def test_nothing_of_a_replaced_or_forgotten_estimate_stays(devices: int) -> None:
    estimator = IncrementalEstimator()
    estimator.update({d: Estimate(vector(1.0, float(d % 7)), 1.0, 0) for d in range(devices)})
    before = estimator.direction()
    estimator.update(
        {0: Estimate(vector(1e9, -1e9), 1.0, 1), devices: Estimate(vector(3e8, 1.0), 5.0, 1)}
    )
    estimator.update({0: Estimate(vector(1.0, 0.0), 1.0, 2)})
    estimator.forget(devices)
    np.testing.assert_array_equal(estimator.direction(), before)


def test_the_global_estimator_survives_a_restart_to_the_bit() -> None:
    rng = np.random.default_rng(1)
    estimator, other = IncrementalEstimator(), IncrementalEstimator()
    for round_ in range(40):
        estimator.update(
            {
                int(d): Estimate(rng.standard_normal(3).astype(np.float32), 0.1, round_)
                for d in rng.integers(0, 99, 5)
            }
        )
    estimator.forget(next(iter(estimator.snapshot()["devices"].tolist())))
    other.restore(estimator.snapshot())
    news = {1000: Estimate(vector(1, 2, 3), 0.7, 41)}
    estimator.update(news)
    other.update(news)
    np.testing.assert_array_equal(estimator.direction(), other.direction())


def test_old_estimates_expire() -> None:
    estimator = IncrementalEstimator(max_age=10)
    estimator.update({1: Estimate(vector(5.0), 1.0, 0)})
    estimator.update({2: Estimate(vector(1.0), 1.0, 11)})
    np.testing.assert_array_equal(estimator.direction(), vector(1.0))


def test_participants_takes_this_round_only_and_keeps_it_where_none_reports() -> None:
    estimator = RoundMeanEstimator()
    assert estimator.direction() is None
    estimator.update({1: Estimate(vector(1.0), 1.0, 0), 2: Estimate(vector(4.0), 2.0, 0)})
    np.testing.assert_array_equal(estimator.direction(), vector(3.0))
    estimator.update({3: Estimate(vector(7.0), 1.0, 1)})
    estimator.update({})
    np.testing.assert_array_equal(estimator.direction(), vector(7.0))
