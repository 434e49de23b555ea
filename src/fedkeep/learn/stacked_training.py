"""Local training of several devices at once: one vmap over stacked parameters instead of a loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from fedkeep.core.types import Batch, FloatArray, LocalTraining, Vector
from fedkeep.learn.network import Network, as_tensor

_DEVICES = 3
_SAMPLES = 16
"""With fewer devices, or more samples each, a loop over LeNet or the traffic CNN was as fast or faster."""


def is_stackable(batches: Sequence[Batch], local: LocalTraining) -> bool:
    """Whether one call is faster than a loop: many devices, few samples each, no mini-batches to align."""
    return len(batches) >= _DEVICES and max(map(len, batches)) <= _SAMPLES and local.batch_size is None


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

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        logits = functional_call(network.module, parameters, (x,))
        return cross_entropy(logits, y, reduction="none") @ share

    anchor = as_tensor(model)
    models = anchor.repeat(len(batches), 1)
    layout = network.layout
    parameters = {
        name: models[:, part].view(-1, *shape)
        for name, part, shape in zip(layout.names, layout.slices, layout.shapes, strict=True)
    }
    gradients = vmap(grad(loss))
    for _ in range(local.epochs):
        step = torch.cat([g.flatten(1) for g in gradients(parameters, x, y, share).values()], dim=1)
        models.lerp_(anchor.expand_as(models), local.learning_rate * local.proximal)
        models.add_(step, alpha=-local.learning_rate)
    return [vector.numpy().copy() for vector in models]
