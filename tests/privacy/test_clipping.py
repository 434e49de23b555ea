"""Clipped mean gradients, against one sample at a time."""

from __future__ import annotations

import numpy as np
import pytest

from fedkeep.core.ports import FleetLearner
from fedkeep.core.types import AnyArray, Batch, Vector
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.privacy.clipping import ClippedFleetLearner, ClippedLearner

CLIP = 0.7


def batch(n: int, shape: tuple[int, ...] = (12,), seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, *shape)).astype(np.float32)
    return Batch(x, rng.integers(0, 4, n), np.arange(n))


def one_by_one(learner: FleetLearner, model: Vector, samples: Batch, weights: AnyArray) -> AnyArray:
    """sum_i w_i grad_i / n, from the mean gradients of batches of one."""
    probe = learner.probe(model)
    each = [probe.measure(samples.take(slice(i, i + 1))).mean_gradient() for i in range(len(samples))]
    summed: AnyArray = weights @ np.array(each, dtype=np.float64)
    return summed / len(samples)


def learners() -> list[FleetLearner]:
    found: list[FleetLearner] = [
        DenseLearner((12, 4)),
        DenseLearner((12, 7, 4)),
        DenseLearner((12, 7, 4), last_layers=1),
    ]
    return found


@pytest.mark.parametrize("learner", learners())
def test_weighted_gradients_are_the_weighted_mean_of_single_ones(learner: FleetLearner) -> None:
    samples, model = batch(9), learner.initial(1)
    weights = np.random.default_rng(2).uniform(0, 2, 9)
    expected = one_by_one(learner, model, samples, weights)
    measured = learner.probe(model).measure(samples)
    np.testing.assert_allclose(measured.weighted_gradient(weights), expected, atol=1e-5)
    np.testing.assert_allclose(measured.weighted_gradient(np.ones(9)), measured.mean_gradient(), atol=1e-7)


@pytest.mark.parametrize("learner", learners())
def test_each_gradient_is_clipped_before_the_mean(learner: FleetLearner) -> None:
    samples, model = batch(9), learner.initial(1)
    norms = learner.probe(model).measure(samples).norms()
    assert (norms > CLIP).any()
    expected = one_by_one(learner, model, samples, np.minimum(1, CLIP / norms))
    one = ClippedLearner(learner, CLIP).probe(model).measure(samples)
    many = ClippedFleetLearner(learner, CLIP).measure_many([model, model], [samples, batch(3)])
    np.testing.assert_allclose(one.mean_gradient(), expected, atol=1e-5)
    np.testing.assert_allclose(many[0].mean_gradient(), expected, atol=1e-5)
    assert np.linalg.norm(one.mean_gradient()) <= CLIP * (1 + 1e-5)


def test_scores_stay_exact_behind_the_clip() -> None:
    learner = DenseLearner((12, 7, 4))
    samples, model = batch(6), learner.initial(0)
    exact, clipped = (each.probe(model).measure(samples) for each in (learner, ClippedLearner(learner, 0.01)))
    direction = learner.initial(5)
    np.testing.assert_array_equal(exact.losses(), clipped.losses())
    np.testing.assert_array_equal(exact.norms(), clipped.norms())
    np.testing.assert_array_equal(exact.head_norms(), clipped.head_norms())
    np.testing.assert_array_equal(exact.projections(direction), clipped.projections(direction))
    np.testing.assert_array_equal(exact.activations(), clipped.activations())


def test_one_outlier_moves_the_estimator_by_no_more_than_its_sensitivity() -> None:
    learner = ClippedLearner(DenseLearner((12, 4)), CLIP)
    samples, model = batch(20), learner.initial(0)
    outlier = samples.x.copy()
    outlier[3] = 1e6
    moved = [learner.probe(model).measure(Batch(x, samples.y, samples.ids)) for x in (samples.x, outlier)]
    distance = np.linalg.norm(moved[0].mean_gradient() - moved[1].mean_gradient())
    assert 0 < distance <= 2 * CLIP / 20 * (1 + 1e-4)
