"""Weighted local SGD of torch modules: one device by autograd, several at once in a chain of layers."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.errors import ConfigError
from fedkeep.core.ports import Job
from fedkeep.core.types import LocalTraining, Vector
from fedkeep.learn.chain import Chain
from fedkeep.learn.jobs import Gradients, descend
from fedkeep.learn.layers import as_tensor, output_error
from fedkeep.learn.network import CHUNK, Network

_STACKED_SAMPLES = 24
"""With more samples each, a loop over LeNet or the traffic CNN was as fast or faster."""


def is_stackable(network: Network, jobs: Sequence[Job], local: LocalTraining) -> bool:
    """Whether one call is possible and faster than a loop: few samples each, no mini-batches to align."""
    most = max((len(job.batch) for job in jobs), default=0)
    return network.chain is not None and 0 < most <= _STACKED_SAMPLES and local.batch_size is None


def train_alone(network: Network, model: Vector, job: Job, local: LocalTraining) -> Vector:
    """Where the job leads from `model`, on the module itself, which must be in training."""
    network.load(model)
    _descend(network, network.flat[None], [job], local, partial(_differentiated, network))
    return np.array(network.flat.numpy())


def train_stacked(network: Network, model: Vector, jobs: Sequence[Job], local: LocalTraining) -> list[Vector]:
    """Full-batch training for each job from the same model; short batches are padded with weightless samples."""
    models = as_tensor(model).repeat(len(jobs), 1)
    _descend(network, models, jobs, local, partial(_chained, cast("Chain", network.chain)))
    return list(models.numpy())


def _descend(network: Network, models: Tensor, jobs: Sequence[Job], local: LocalTraining, gradients: Gradients) -> None:
    parameters = network.layout.views(models)
    descend(models, parameters, jobs, local, gradients, valued=network.valued.size, array=as_tensor)


def _differentiated(
    network: Network, _parameters: Sequence[Tensor], x: Tensor, y: Tensor, share: Tensor
) -> Sequence[Tensor]:
    """Of the one model that the module holds, by autograd, as many samples at a time as stay in the cache."""
    total: Sequence[Tensor] = ()
    for part, labels, own in zip(*(torch.split(rows[0], CHUNK) for rows in (x, y, share)), strict=True):
        logits = network.module(part)
        error = output_error(logits.detach(), labels).mul_(own[:, None])
        found = torch.autograd.grad((logits * error).sum(), network.parameters, materialize_grads=True)
        total = [one + other for one, other in zip(total, found, strict=True)] if total else found
    return total


def _chained(chain: Chain, parameters: Sequence[Tensor], x: Tensor, y: Tensor, share: Tensor) -> Sequence[Tensor]:
    """Of a plain chain of layers, by matrix products."""
    passed = chain.forward(parameters, x)
    return chain.gradients(parameters, passed, output_error(passed.logits, y).mul_(share[:, None]))


def add_to_gradients(module: nn.Module, correction: Vector) -> None:
    """Adds a correction to the gradients of a module that somebody else trains: of its last parameters.

    >>> layer = nn.Linear(2, 1)
    >>> layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> add_to_gradients(layer, np.array([0.5, 0.0, -1.0], dtype=np.float32))  # weight, then bias
    >>> layer.weight.grad.tolist(), layer.bias.grad.tolist()
    ([[3.5, 4.0]], [0.0])
    """
    left = as_tensor(correction)
    with torch.no_grad():
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            cut = len(left) - parameter.numel()
            if cut < 0:
                break
            part = left[cut:].view(parameter.shape).to(parameter.device)
            parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)
            left = left[:cut]
    if len(left):
        raise ConfigError(f"a correction of {len(correction)} numbers does not fit this model: give it the one synced")
