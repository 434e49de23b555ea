"""What one linear or convolutional torch layer contributes, from its inputs `a` and output errors `e`.

For z = W * a the gradient of a sample's loss by W is bilinear in a and e, so that projections, sums and norms
of gradients need no gradient per sample: <grad_i, D> = <e_i, D * a_i>.
"""

from collections.abc import Iterator
from functools import partial
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import vmap

BilinearLayer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d

Seen: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and output errors of a layer, sample by sample."""

_BLOCK = 1 << 20
"""Numbers of per-sample gradients held at a time."""


def is_bilinear(module: nn.Module) -> bool:
    """Whether the closed forms of this file hold for it; subclasses may do anything, so they do not count."""
    if type(module) is nn.Linear:
        return True
    convolves = type(module) in (nn.Conv1d, nn.Conv2d)
    return convolves and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def project(layer: BilinearLayer, a: Tensor, e: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """<grad_i, direction> per sample: the response to the direction as weights, weighed by the error."""
    if isinstance(layer, nn.Linear):
        response = F.linear(a, weight, bias)
    else:
        response = torch.convolution(
            a, weight, bias, layer.stride, _padding(layer), layer.dilation, False, _none(layer), layer.groups
        )
    response *= e
    return response.sum(tuple(range(1, response.dim())))


def summed_gradient(layer: BilinearLayer, a: Tensor, e: Tensor) -> list[Tensor]:
    """The gradients of the weight and, where there is one, the bias, summed over the samples."""
    if isinstance(layer, nn.Linear):
        if a.dim() > 2:
            a, e = a.flatten(0, -2), e.flatten(0, -2)
        parts = [e.T @ a, e.sum(0)]
    else:
        _, weight, bias = torch.ops.aten.convolution_backward(
            e, a, layer.weight, [layer.out_channels], layer.stride, _padding(layer), layer.dilation, False,
            _none(layer), layer.groups, [False, True, layer.bias is not None],
        )  # fmt: skip
        parts = [weight, bias]
    return parts if layer.bias is not None else parts[:1]


def inner_products(layer: BilinearLayer, one: Seen, two: Seen) -> Tensor:
    """<grad_i, grad'_i> per sample, of the same samples under two models, or one."""
    (a, e), (b, f) = one, two
    if isinstance(layer, nn.Linear) and a.dim() == 2:
        return ((a * b).sum(1) + (layer.bias is not None)) * (e * f).sum(1)
    mine, same = _explicit_gradients(layer, one), a is b and e is f
    pairs = ((g, g) for g in mine) if same else zip(mine, _explicit_gradients(layer, two), strict=True)
    return torch.cat([_products(*pair) for pair in pairs])


def _explicit_gradients(layer: BilinearLayer, seen: Seen) -> Iterator[list[Tensor]]:
    """Each sample's gradient by weight and bias, (n, numbers), for a few samples at a time.

    For weights that are used at several places: their products are summed before anything is made of them.
    """
    step = max(1, _BLOCK // layer.weight.numel())
    of_each = vmap(partial(summed_gradient, layer))
    for a, e in zip(*(torch.split(rows, step) for rows in seen), strict=True):
        yield [gradient.flatten(1) for gradient in of_each(a[:, None], e[:, None])]


def _products(one: list[Tensor], two: list[Tensor]) -> Tensor:
    return torch.stack([(g * h).sum(1) for g, h in zip(one, two, strict=True)]).sum(0)


def _padding(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
    return cast("tuple[int, ...]", layer.padding)  # is_bilinear admits no names such as "same"


def _none(layer: nn.Conv1d | nn.Conv2d) -> list[int]:
    """No output padding, in as many dimensions as the layer has."""
    return [0] * len(layer.stride)
