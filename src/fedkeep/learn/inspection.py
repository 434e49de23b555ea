"""A learner's first look at a module: which of the two ways to measure it is right, if any.

Three samples are measured one by one by plain backprop, then as a batch by the closed forms. That costs a few
milliseconds once, and means that a module which calls a layer twice, ties weights, or mixes samples in a way
no list of layer types could foresee is found out rather than measured wrongly.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.errors import FedkeepError
from fedkeep.core.ports import Measurements
from fedkeep.core.types import AnyArray, Batch, Scores, Vector
from fedkeep.learn.autograd_measurements import AutogradMeasurements
from fedkeep.learn.chain_trace import ChainTrace
from fedkeep.learn.layers import is_bilinear
from fedkeep.learn.network import Network, as_tensor
from fedkeep.learn.torch_loss import losses
from fedkeep.learn.torch_measurements import HeadMeasurements, TorchMeasurements
from fedkeep.learn.traced import TracedMeasurements

MeasurementsClass: TypeAlias = type[TorchMeasurements] | type[HeadMeasurements] | type[AutogradMeasurements]

_TOLERANCE = 1e-3


def choose_measurements(network: Network, model: Vector, batch: Batch) -> MeasurementsClass:
    """The fastest measurements that are exact for this module."""
    trial = _trial(batch)
    direction = np.random.default_rng(0).normal(size=network.valued.size).astype(np.float32)
    with network.lock:
        alone, projections, norms = _one_by_one(network, model, trial, direction)
        together = AutogradMeasurements(network, model, trial, len(trial)).losses()
        if not np.allclose(together, alone, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise FedkeepError(
                "the model's loss of a sample depends on the other samples of its batch, so no sample has a "
                "gradient of its own: replace the layer that mixes samples"
            )
        try:
            candidate = _candidate(network, as_tensor(trial.x))
            seen = candidate(network, model, trial, len(trial))
            right = _agree(seen, direction, projections, norms)
        except (RuntimeError, ValueError):  # a layer called twice or never, or an output changed in place
            right = False
    return candidate if right else AutogradMeasurements


def is_traceable(network: Network, model: Vector, batch: Batch) -> bool:
    """Whether the module is a chain of layers whose one pass over many models sees what each alone would see."""
    if network.chain is None or not network.chain.ends_linear:
        return False
    trial = _trial(batch)
    direction = np.random.default_rng(0).normal(size=network.valued.size).astype(np.float32)
    with network.lock:
        _, projections, norms = _one_by_one(network, model, trial, direction)
    try:
        seen = TracedMeasurements(ChainTrace(network, [model], [trial]), network.valued, len(trial))
        return _agree(seen, direction, projections, norms)
    except RuntimeError:  # a linear layer that is used at several places, for instance
        return False


def _agree(seen: Measurements, direction: Vector, projections: Scores, norms: Scores) -> bool:
    scale = float(np.linalg.norm(direction) * norms.max()) + 1e-12
    right = np.allclose(seen.projections(direction), projections, rtol=0.0, atol=_TOLERANCE * scale)
    return right and np.allclose(seen.norms(), norms, rtol=_TOLERANCE)


def _candidate(network: Network, x: Tensor) -> MeasurementsClass:
    """The fastest measurements that the types of the valued layers allow."""
    if not all(is_bilinear(layer) for layer in network.valued_layers):
        return AutogradMeasurements
    logits, [[(activations, output)]] = network.observe(x, [network.head])
    network.head_is_output = output is logits
    linear = isinstance(network.head, nn.Linear) and network.head.bias is not None and activations.dim() == 2
    only_head = len(network.valued_layers) == 1
    return HeadMeasurements if only_head and linear and network.head_is_output else TorchMeasurements


def _trial(batch: Batch) -> Batch:
    """Three different samples of the batch's shape, made from its first."""
    x = np.stack([np.roll(batch.x[0].ravel(), shift).reshape(batch.x[0].shape) for shift in (0, 1, 5)])
    return Batch(x, np.repeat(batch.y[:1], 3), np.arange(3))


def _one_by_one(network: Network, model: Vector, batch: Batch, direction: Vector) -> tuple[Scores, Scores, Scores]:
    """Loss, projection and norm of each sample's gradient, by backprop of that sample alone."""
    network.load(model)
    rows = [_backprop(network, as_tensor(batch.x[i : i + 1]), as_tensor(batch.y[i : i + 1])) for i in range(len(batch))]
    gradients = np.stack([gradient for _, gradient in rows]).astype(np.float64)
    return np.array([loss for loss, _ in rows]), gradients @ direction, np.linalg.norm(gradients, axis=1)


def _backprop(network: Network, x: Tensor, y: Tensor) -> tuple[float, AnyArray]:
    with network.differentiable():
        loss = losses(network.module(x), y)
        parts = torch.autograd.grad(loss, network.valued_parameters, materialize_grads=True)
    return loss.item(), torch.cat([part.reshape(-1) for part in parts]).numpy()
