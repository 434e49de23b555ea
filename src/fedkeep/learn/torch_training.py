"""Weighted local SGD of torch modules: one device by autograd, several at once in a chain of layers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fedkeep.core.errors import ConfigError
from fedkeep.core.ports import Job
from fedkeep.core.types import LocalTraining, Vector
from fedkeep.learn.chain import Chain
from fedkeep.learn.jobs import corrections, minibatches
from fedkeep.learn.network import CHUNK, Network, as_tensor, output_error

Gradients: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
"""From each sample's share, (C, n), to the gradients of C models' losses weighted by it, (C, *shape) each."""
_STACKED_SAMPLES = 24
"""With more samples each, a loop over LeNet or the traffic CNN was as fast or faster."""


class TorchDescent:
    """The steps of Eq. 12 for C models at once, in place, however gradients are had: `parameters` view `models`."""

    def __init__(
        self, models: Tensor, parameters: Sequence[Tensor], correction: Tensor | None, local: LocalTraining
    ) -> None:
        self._models, self._parameters, self._correction, self._local = models, parameters, correction, local
        self._anchor = models.clone() if local.proximal else None

    def step(self, gamma: Tensor, gradients: Gradients) -> None:
        """One step on samples that weigh `gamma`, (C, n); where they all weigh nothing the model stays."""
        total = gamma.sum(1, keepdim=True)
        if not total.any():
            return
        rate = self._local.learning_rate
        found = gradients(gamma / total.clamp_min(torch.finfo(torch.float32).tiny))
        if self._anchor is not None:
            self._models.lerp_(self._anchor, rate * self._local.proximal)
        for parameter, gradient in zip(self._parameters, found, strict=True):
            parameter.add_(gradient, alpha=-rate)
        if self._correction is not None:
            self._models[:, -self._correction.shape[1] :].add_(self._correction, alpha=-rate)


def train_alone(network: Network, model: Vector, job: Job, local: LocalTraining) -> Vector:
    """Where the job leads from `model`, on the module itself, which must be in training."""
    x, y, gamma = as_tensor(job.batch.x), as_tensor(job.batch.y), _weights(job)
    network.load(model)
    models = network.flat[None]
    descent = TorchDescent(models, network.stacked(models), _corrections(network, [job]), local)
    for index in minibatches(len(job.batch), local, job.seed):
        descent.step(gamma[index][None], partial(_differentiated, network, x[index], y[index]))
    return np.array(network.flat.numpy())


def is_stackable(network: Network, jobs: Sequence[Job], local: LocalTraining) -> bool:
    """Whether one call is possible and faster than a loop: few samples each, no mini-batches to align."""
    most = max((len(job.batch) for job in jobs), default=0)
    return network.chain is not None and 0 < most <= _STACKED_SAMPLES and local.batch_size is None


def train_stacked(network: Network, model: Vector, jobs: Sequence[Job], local: LocalTraining) -> list[Vector]:
    """Full-batch training for each job from the same model; short batches are padded with weightless samples."""
    x = pad_sequence([as_tensor(job.batch.x) for job in jobs], batch_first=True)
    y = pad_sequence([as_tensor(job.batch.y) for job in jobs], batch_first=True)
    gamma = pad_sequence([_weights(job) for job in jobs], batch_first=True)
    models = as_tensor(model).repeat(len(jobs), 1)
    parameters = network.stacked(models)
    descent = TorchDescent(models, parameters, _corrections(network, jobs), local)
    for _ in range(local.epochs):
        descent.step(gamma, partial(_chained, cast("Chain", network.chain), parameters, x, y))
    return list(models.numpy())


def add_to_gradients(module: nn.Module, correction: Vector) -> None:
    """Adds a correction to the gradients of a module that somebody else trains: of its last parameters."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    left = as_tensor(correction)
    with torch.no_grad():
        for parameter in reversed(parameters):
            if not len(left):
                return
            cut = len(left) - parameter.numel()
            if cut < 0:
                break
            part = left[cut:].view(parameter.shape).to(parameter.device)
            parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)
            left = left[:cut]
    if len(left):
        raise ConfigError(f"a correction of {len(correction)} numbers does not fit this model: give it the one synced")


def _differentiated(network: Network, x: Tensor, y: Tensor, share: Tensor) -> Sequence[Tensor]:
    """Of the one model that the module holds, by autograd, as many samples at a time as stay in the cache."""
    total: Sequence[Tensor] = ()
    for part, labels, own in zip(*(torch.split(rows, CHUNK) for rows in (x, y, share[0])), strict=True):
        logits = network.module(part)
        error = output_error(logits.detach(), labels).mul_(own[:, None])
        found = torch.autograd.grad((logits * error).sum(), network.parameters, materialize_grads=True)
        total = [one + other for one, other in zip(total, found, strict=True)] if total else found
    return total


def _chained(chain: Chain, parameters: Sequence[Tensor], x: Tensor, y: Tensor, share: Tensor) -> Sequence[Tensor]:
    """Of a plain chain of layers, by matrix products."""
    passed = chain.forward(parameters, x)
    return chain.gradients(parameters, passed, output_error(passed.logits, y).mul_(share[:, None]))


def _weights(job: Job) -> Tensor:
    return torch.tensor(job.weights, dtype=torch.float32)


def _corrections(network: Network, jobs: Sequence[Job]) -> Tensor | None:
    found = corrections(jobs, network.valued.size)
    return None if found is None else as_tensor(found)
