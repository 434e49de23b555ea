"""Every registered policy satisfies every invariant, in every variant."""

from itertools import pairwise

import numpy as np
import pytest

import fedkeep.config.components
from fedkeep.core.device import Device
from fedkeep.core.policies.fedbalancer import FedBalancer
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policies.reservoir import Reservoir
from fedkeep.core.policies.sld import Sld
from fedkeep.core.policy import POLICIES, SelectionPolicy
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import Assignment, Batch, LocalTraining, TrainOrder
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.losses import NumberLoss
from fedkeep.testing import check_policy

assert fedkeep.config.components

VARIANTS: list[SelectionPolicy] = [
    *(cls() for cls in POLICIES.values()),
    FedBalancer(variant="authors"),
    Sld(variant="authors"),
    Reservoir(restart=True),
    Ode(value="cosine"),
    Ode(value="clipped"),
    Ode(value="divergence"),
    Ode(choice="drawn"),
    Ode(choice="drawn", sharpness=10),
]


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_chooses_among_numbers_to_predict(policy: SelectionPolicy) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    y = x.sum(axis=1) + 10.0
    learner = DenseLearner((4, 1), loss=NumberLoss(centre=10.0, scale=2.0))
    targets, samples = NumberTargets((9.0, 11.0)), Batch(x, y, np.arange(60))
    kept = []
    for cuts in ([0, 60], [0, 1, 30, 60]):
        device = Device(
            learner, policy, capacity=9, sample_shape=(4,), labels=3, targets=targets, seed=5
        )
        device.set_model(learner.initial(1))
        device.apply_plan(Assignment(np.full(device.regions.count, 3), np.ones(3), 1.0))
        for start, stop in pairwise(cuts):
            device.observe(samples.take(slice(start, stop)), 0.0)
        order = TrainOrder(0, learner.initial(2), learner.initial(3), LocalTraining(0.1, 2))
        report = device.participate(order)
        assert np.isfinite(report.model).all()
        assert report.samples > 0
        stored = device.store.stored().batch
        assert np.array_equal(stored.y, y[stored.ids])
        kept.append(stored.ids.tolist())
    assert kept[0] == kept[1], "cutting the stream otherwise changes nothing"


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_keeps_the_laws(policy: SelectionPolicy) -> None:
    report = check_policy(policy)
    assert {"scores", "inputs", "rescoring"} <= set(report.passed)
    choosing = {"chunking", "restart", "repeatable", "memory"}
    assert choosing <= set(report.skipped if policy.unbounded else report.passed)
    assert ("global-gradient" in report.passed) == policy.uses_global_gradient
