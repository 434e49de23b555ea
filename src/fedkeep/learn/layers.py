"""What one linear or convolutional torch layer contributes to its samples' gradients, and the loss above them all."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import vmap

from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Scores, Vector
from fedkeep.learn.measurements import Factors, Outer

BilinearLayer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d
_BLOCK = 1 << 20
"""Numbers of per-sample gradients held at a time."""
_MINUS_ONE = torch.tensor(-1.0)


def as_tensor(array: AnyArray) -> Tensor:
    """The array as a tensor, floats as float32; copied only where it must be: torch wants writable memory."""
    if array.dtype.kind == "f" and array.dtype != "float32":
        array = array.astype("float32")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample, (n,); autograd and vmap can go through it."""
    return F.cross_entropy(logits, y, reduction="none")


def output_error(logits: Tensor, y: Tensor) -> Tensor:
    """The gradient of each sample's loss by its logits, softmax(z) - onehot(y); classes are axis 1."""
    error = torch.softmax(logits, dim=1)
    index = y[:, None]
    return error.scatter_add_(1, index, _MINUS_ONE.expand(index.shape))


def is_bilinear(module: nn.Module) -> bool:
    """Whether the closed forms of this file hold for it; subclasses may do anything, so they do not count."""
    if type(module) is nn.Linear:
        return True
    convolves = type(module) in (nn.Conv1d, nn.Conv2d)
    return convolves and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def factors_of(layer: nn.Module, a: Tensor, e: Tensor) -> "Outer | Placed":
    """The samples' gradients by a bilinear layer, from its inputs and output errors, sample by sample."""
    bilinear = cast("BilinearLayer", layer)
    if isinstance(bilinear, nn.Linear) and a.dim() == 2:
        return Outer(a.numpy(), e.numpy(), bilinear.bias is not None)
    return Placed(bilinear, a, e)


@dataclass(frozen=True, eq=False)
class Placed:
    """A weight that is used at several places of a sample: that of a convolution, or of a linear layer along a row."""

    layer: BilinearLayer
    a: Tensor
    e: Tensor

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.layer.parameters())

    def inner(self, other: Factors) -> AnyArray:
        """From the gradients themselves: what a sample's places say is summed before anything is made of it."""
        theirs = of_kind(Placed, other)
        return inner_products(self._gradients(), None if theirs is self else theirs._gradients())

    def project(self, direction: Vector) -> AnyArray:
        """As <e, layer(a)>, with the direction in place of the layer's own weight and bias."""
        weight, bias = self.layer.weight, self.layer.bias
        toward, rest = as_tensor(direction).tensor_split([weight.numel()])
        own = toward.view(weight.shape), None if bias is None else rest
        linear = isinstance(self.layer, nn.Linear)
        response = F.linear(self.a, *own) if linear else torch.convolution(self.a, *own, *self._geometry)
        response *= self.e
        return response.sum(tuple(range(1, response.dim()))).numpy()

    def add_up(self, shares: Vector, out: Vector) -> None:
        e = self.e * as_tensor(shares).view(-1, *[1] * (self.e.dim() - 1))
        torch.cat([gradient.reshape(-1) for gradient in self._summed(self.a, e)], out=torch.from_numpy(out))

    def _summed(self, a: Tensor, e: Tensor) -> list[Tensor]:
        """The gradients of the weight and, where there is one, the bias, summed over these samples."""
        if isinstance(self.layer, nn.Linear):
            a, e = a.flatten(0, -2), e.flatten(0, -2)
            return [e.T @ a] if self.layer.bias is None else [e.T @ a, e.sum(0)]
        wanted = [False, True, self.layer.bias is not None]
        _, weight, bias = torch.ops.aten.convolution_backward(
            e, a, self.layer.weight, [self.layer.out_channels], *self._geometry, wanted
        )
        return [weight] if bias is None else [weight, bias]

    def _gradients(self) -> Iterator[list[Tensor]]:
        """Each sample's gradient by weight and bias, (n, *shape), for a few samples at a time."""
        step = max(1, _BLOCK // self.layer.weight.numel())
        of_each = vmap(self._summed)
        for a, e in zip(torch.split(self.a, step), torch.split(self.e, step), strict=True):
            yield of_each(a[:, None], e[:, None])

    @cached_property
    def _geometry(self) -> tuple[Any, ...]:
        """Stride, padding and dilation, not transposed, no output padding, and groups of a convolution."""
        layer = cast("nn.Conv2d", self.layer)
        return layer.stride, layer.padding, layer.dilation, False, [0] * len(layer.stride), layer.groups


def inner_products(mine: Iterator[list[Tensor]], theirs: Iterator[list[Tensor]] | None) -> Scores:
    """<grad_i, grad'_i> per sample, from the gradients by each parameter, (n, ...), of a few samples at a time.

    Without `theirs` it is the squared norms: gradients are made once then.
    """
    pairs = ((g, g) for g in mine) if theirs is None else zip(mine, theirs, strict=True)
    parts = [[(g.double() * h.double()).flatten(1).sum(1) for g, h in zip(*pair, strict=True)] for pair in pairs]
    return torch.cat([torch.stack(part).sum(0) for part in parts]).numpy()
