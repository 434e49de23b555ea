"""Local training of several devices at once: over stacked parameters instead of a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from fedkeep.core.types import Batch, FloatArray, LocalTraining, Vector
from fedkeep.learn.chain import Chain
from fedkeep.learn.network import Network, as_tensor, output_error

Gradients: TypeAlias = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor], Sequence[Tensor]]
"""From C models' parameters, samples (C, n, ...), labels and shares (C, n) to the gradients of their mean losses."""
_CHAINED_SAMPLES = 64
_MAPPED_DEVICES, _MAPPED_SAMPLES = 3, 16
"""With fewer devices, or more samples each, a loop over LeNet or the traffic CNN was as fast or faster."""


def is_stackable(network: Network, batches: Sequence[Batch], local: LocalTraining) -> bool:
    """Whether one call is faster than a loop: few samples each, no mini-batches to align."""
    most = max(map(len, batches), default=0)
    limit = _CHAINED_SAMPLES if network.chain else _MAPPED_SAMPLES
    enough = network.chain is not None or len(batches) >= _MAPPED_DEVICES
    return enough and 0 < most <= limit and local.batch_size is None


def train_stacked(
    network: Network,
    model: Vector,
    batches: Sequence[Batch],
    weights: Sequence[FloatArray],
    local: LocalTraining,
) -> list[Vector]:
    """Full-batch Eq. 12 for each batch from the same model; short ones are padded with weightless samples."""
    x = pad_sequence([as_tensor(batch.x) for batch in batches], batch_first=True)
    y = pad_sequence([as_tensor(batch.y) for batch in batches], batch_first=True)
    gamma = pad_sequence([torch.tensor(own, dtype=torch.float32) for own in weights], batch_first=True)
    share = gamma / gamma.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    anchor = as_tensor(model)
    models = anchor.repeat(len(batches), 1)
    layout = network.layout
    parameters = [models[:, part].view(-1, *shape) for part, shape in zip(layout.slices, layout.shapes, strict=True)]
    gradients = _chained(network.chain) if network.chain else _mapped(network)
    for _ in range(local.epochs):
        step = torch.cat([g.flatten(1) for g in gradients(parameters, x, y, share)], dim=1)
        if local.proximal:
            models.lerp_(anchor.expand_as(models), local.learning_rate * local.proximal)
        models.add_(step, alpha=-local.learning_rate)
    return [vector.numpy().copy() for vector in models]


def _chained(chain: Chain) -> Gradients:
    def gradients(parameters: Sequence[Tensor], x: Tensor, y: Tensor, share: Tensor) -> list[Tensor]:
        passed = chain.forward(parameters, x)
        return chain.gradients(parameters, passed, output_error(passed.logits, y).mul_(share[:, None]))

    return gradients


def _mapped(network: Network) -> Gradients:
    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        logits = functional_call(network.module, parameters, (x,))
        return cross_entropy(logits, y, reduction="none") @ share

    of_all = vmap(grad(loss))

    def gradients(parameters: Sequence[Tensor], x: Tensor, y: Tensor, share: Tensor) -> list[Tensor]:
        named = dict(zip(network.layout.names, parameters, strict=True))
        return list(of_all(named, x, y, share).values())

    return gradients
