"""Weighted mean gradients of torch models, by closed forms and autograd, against single ones."""

import numpy as np
import pytest

from fedkeep.core.types import Batch

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from torch import nn

from fedkeep.learn.torch_learner import TorchLearner


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 4))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.LayerNorm(8), nn.Linear(8, 4))


@pytest.mark.parametrize("make", [convolutional, normalised])
@pytest.mark.parametrize("last_layers", [None, 1])
def test_weighted_gradients_are_the_weighted_mean_of_single_ones(make, last_layers) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    learner = TorchLearner(make, last_layers=last_layers)
    rng = np.random.default_rng(0)
    samples = Batch(
        rng.normal(size=(300, 1, 6, 6)).astype(np.float32), rng.integers(0, 4, 300), np.arange(300)
    )
    weights = rng.uniform(0, 2, 300)
    probe = learner.probe(learner.initial(0))
    each = [
        probe.measure(samples.take(slice(i, i + 1))).mean_gradient().astype(np.float64)
        for i in range(300)
    ]
    measured = probe.measure(samples)
    np.testing.assert_allclose(
        measured.weighted_gradient(weights), weights @ np.array(each) / 300, atol=1e-5
    )
    np.testing.assert_allclose(
        measured.weighted_gradient(np.ones(300)), measured.mean_gradient(), atol=1e-6
    )
