"""BatchNorm with its statistics held fast: one sample's loss then depends on no other, as valuing needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class FrozenNorm(nn.Module):
    """What a BatchNorm layer is in evaluation mode, with parameters and statistics of the same names."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, cast("Tensor", getattr(norm, name)).clone())

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        normal = (x - self.running_mean.view(shape)) * torch.rsqrt(self.running_var.view(shape) + self.eps)
        if self.weight is None:
            return normal
        return normal * self.weight.view(shape) + self.bias.view(shape)


def with_frozen_norms(factory: Callable[[], nn.Module]) -> nn.Module:
    """A new module of the factory, its BatchNorm layers frozen wherever they have statistics."""
    module = factory()
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and child.running_mean is not None:
                setattr(parent, name, FrozenNorm(child))
    return module
