"""Max-pooling over windows that tile the input, as the largest of a few strided views: torch's own is slow on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

Pool: TypeAlias = nn.MaxPool1d | nn.MaxPool2d


class FastPool(nn.Module):
    """The pooling it replaces; where no gradient is wanted, in a fraction of the time."""

    def __init__(self, pool: nn.MaxPool2d, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self._pool, self._kernel = pool, kernel

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            return cast("Tensor", self._pool(x))
        return reduce(torch.maximum, corners(x, self._kernel))


def with_fast_pools(module: nn.Module) -> nn.Module:
    """The module, its poolings of pictures replaced wherever their windows tile the input."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.MaxPool2d and (kernel := tiling(child)):
                setattr(parent, name, FastPool(child, kernel))
    return module


def corners(x: Tensor, kernel: Sequence[int]) -> list[Tensor]:
    """The first place of every window of x's last axes, the second of every window, and so on."""
    sizes = [size // k * k for size, k in zip(x.shape[-len(kernel) :], kernel, strict=True)]
    parts = []
    for start in product(*map(range, kernel)):
        places: tuple[Any, ...] = (..., *map(slice, start, sizes, kernel))
        parts.append(x[places])
    return parts


def tiling(pool: Pool) -> tuple[int, ...] | None:
    """The windows' sizes along each axis; None where they overlap, leave gaps or reach beyond the input."""
    axes = 1 if isinstance(pool, nn.MaxPool1d) else 2
    kernel, stride, padding, dilation = (
        _each(size, axes) for size in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    tiles = kernel == stride and not any(padding) and set(dilation) == {1}
    return kernel if tiles and not pool.ceil_mode and not pool.return_indices else None


def _each(size: Any, axes: int) -> tuple[int, ...]:
    return tuple(size) if isinstance(size, tuple) else (size,) * axes
