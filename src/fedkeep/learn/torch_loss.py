"""Softmax cross-entropy in torch: each sample's loss, and its error at the logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

_MINUS_ONE = torch.tensor(-1.0)


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample, (n,); autograd and vmap can go through it."""
    return cross_entropy(logits, y, reduction="none")


def output_error(logits: Tensor, y: Tensor) -> Tensor:
    """The gradient of each sample's loss by its logits, softmax(z) - onehot(y); classes are axis 1."""
    error = torch.softmax(logits, dim=1)
    index = y[:, None]
    return error.scatter_add_(1, index, _MINUS_ONE.expand(index.shape))
