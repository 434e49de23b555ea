"""Chains of layers over C models at once, each with its own samples, by matrix products alone.

A round's participants have a few samples each, so that calls cost more than what they compute. Here one call does
a layer for all models, without autograd, and a small convolution or pooling takes a fraction of torch's time.
Activations are (C, channels, n, ...): a layer with a weight is then one product for each model.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice, product
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedkeep.learn.layers import is_bilinear
from fedkeep.learn.measurements import Explicit, Outer

Saved: TypeAlias = tuple[Tensor, ...]
"""What a layer keeps of its forward pass for its backward pass."""
Pool: TypeAlias = nn.MaxPool1d | nn.MaxPool2d


class Link(ABC):
    """One layer; `own` are its parameters, (C, *shape) each."""

    parameters = 0

    @abstractmethod
    def forward(self, own: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Saved]:
        """The layer's outputs."""

    @abstractmethod
    def backward(self, own: Sequence[Tensor], kept: Saved, error: Tensor) -> Tensor:
        """The error of the inputs, from that of the outputs, which may be overwritten."""

    def gradients(self, kept: Saved, error: Tensor) -> list[Tensor]:  # noqa: ARG002
        """The gradients by the layer's parameters, summed over each model's samples."""
        return []

    def factors(self, kept: Saved, error: Tensor) -> Outer | Explicit:  # noqa: ARG002
        """The same for each sample."""
        raise TypeError(f"{type(self).__name__} has no parameters")


class Linear(Link):
    """Products have the samples as rows: with a few columns, torch's take several times as long."""

    parameters = 2

    def forward(self, own: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Saved]:
        weight, bias = own
        return torch.baddbmm(bias[:, None], x.mT, weight.mT).mT, (x,)

    def backward(self, own: Sequence[Tensor], kept: Saved, error: Tensor) -> Tensor:  # noqa: ARG002
        return (error.mT @ own[0]).mT

    def gradients(self, kept: Saved, error: Tensor) -> list[Tensor]:
        return [torch.from_numpy(error.numpy() @ kept[0].mT.numpy()), error.sum(2)]

    def factors(self, kept: Saved, error: Tensor) -> Outer:
        return Outer(kept[0].mT.contiguous().numpy(), error.mT.contiguous().numpy())


class Convolution(Link):
    """A convolution as a linear layer over columns: what the kernel sees at each place of each sample."""

    parameters = 2

    def __init__(self, layer: nn.Conv1d | nn.Conv2d) -> None:
        self._kernel, self._stride, self._dilation = layer.kernel_size, layer.stride, layer.dilation
        self._padding = cast("tuple[int, ...]", layer.padding)

    def forward(self, own: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Saved]:
        weight, bias = own
        windows = self._windows(pad(x, [p for each in reversed(self._padding) for p in (each, each)]))
        places = windows.shape[-1 - len(self._kernel) :]
        columns = windows.reshape(len(x), -1, prod(places))
        z = torch.baddbmm(bias[:, :, None], weight.flatten(2), columns)
        return z.view(*z.shape[:2], *places), (columns, x)

    def backward(self, own: Sequence[Tensor], kept: Saved, error: Tensor) -> Tensor:
        x = kept[1]
        columns = own[0].flatten(2).mT @ error.flatten(2)
        part = columns.view(len(x), x.shape[1], *self._kernel, *error.shape[2:])
        for axis, (kernel, stride, dilation) in enumerate(self._axes()):
            part = _overlay(part, axis - len(self._kernel), kernel, stride, dilation, self._padding[axis], x.shape)
        return part

    def gradients(self, kept: Saved, error: Tensor) -> list[Tensor]:
        error = error.flatten(2)
        weight = error @ kept[0].mT
        return [weight.view(*weight.shape[:2], -1, *self._kernel), error.sum(2)]

    def factors(self, kept: Saved, error: Tensor) -> Explicit:
        errors = error.flatten(3).transpose(1, 2)
        columns = kept[0].view(len(error), -1, error.shape[2], errors.shape[3]).transpose(1, 2).mT.numpy()
        *lead, outputs, inputs = *errors.shape[:3], columns.shape[3]
        gradients = np.empty((*lead, outputs * (inputs + 1)), dtype=np.float32)
        weight = gradients[..., : outputs * inputs].reshape(*lead, outputs, inputs)
        np.matmul(errors.numpy(), columns, out=weight)  # torch would copy both first
        gradients[..., outputs * inputs :] = errors.sum(3)
        return Explicit(gradients)

    def _axes(self) -> Iterator[tuple[int, int, int]]:
        return zip(self._kernel, self._stride, self._dilation, strict=True)

    def _windows(self, x: Tensor) -> Tensor:
        """Views of x, (C, channels, *kernel, n, *places)."""
        lead, sizes = x.shape[:3], x.shape[3:]
        steps = x.stride()[3:]
        places = [(s - d * (k - 1) - 1) // t + 1 for s, (k, t, d) in zip(sizes, self._axes(), strict=True)]
        within = [d * step for step, (_, _, d) in zip(steps, self._axes(), strict=True)]
        between = [t * step for step, (_, t, _) in zip(steps, self._axes(), strict=True)]
        shape = (*lead[:2], *self._kernel, lead[2], *places)
        return x.as_strided(shape, (*x.stride()[:2], *within, x.stride(2), *between))


def _overlay(
    part: Tensor, axis: int, kernel: int, stride: int, dilation: int, padding: int, whole: Sequence[int]
) -> Tensor:
    """Adds up what the positions of a kernel along one axis, the third of `part`, say of each input along `axis`."""
    last = stride * (part.shape[axis] - 1) + 1
    shape = list(part.shape[:2] + part.shape[3:])
    shape[axis] = whole[axis] + 2 * padding
    total = part.new_zeros(shape)
    inputs = total.movedim(axis, -1)
    for k in range(kernel):
        inputs[..., k * dilation : k * dilation + last : stride] += part[:, :, k].movedim(axis, -1)
    return total.narrow(axis, padding, whole[axis])


class Relu(Link):
    def forward(self, own: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Saved]:  # noqa: ARG002
        positive = x.relu()
        return positive, (positive,)

    def backward(self, own: Sequence[Tensor], kept: Saved, error: Tensor) -> Tensor:  # noqa: ARG002
        return error.mul_(kept[0] > 0)


class MaxPool(Link):
    def __init__(self, kernel: tuple[int, ...]) -> None:
        self._kernel = kernel

    def forward(self, own: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Saved]:  # noqa: ARG002
        largest = largest_of(x, self._kernel)
        return largest, (x, largest)

    def backward(self, own: Sequence[Tensor], kept: Saved, error: Tensor) -> Tensor:  # noqa: ARG002
        x, largest = kept
        return handed_down(x, largest, error, self._kernel)


class Flatten(Link):
    def forward(self, own: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Saved]:  # noqa: ARG002
        return x.movedim(2, -1).reshape(len(x), -1, x.shape[2]), (x,)

    def backward(self, own: Sequence[Tensor], kept: Saved, error: Tensor) -> Tensor:  # noqa: ARG002
        shape = kept[0].shape
        return error.view(*shape[:2], *shape[3:], shape[2]).movedim(-1, 2)


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass: the logits, (C, Y, n), and what each layer keeps of it."""

    logits: Tensor
    kept: list[Saved]


class Chain:
    """The links of a module that is nothing but a chain of them."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links

    @property
    def ends_linear(self) -> bool:
        """Whether the logits come straight from a linear layer."""
        return isinstance(self._links[-1], Linear)

    @staticmethod
    def of(module: nn.Module) -> "Chain | None":
        """The module as a chain; None if any part of it is something else."""
        layers = list(module) if type(module) is nn.Sequential else []
        links = [_link(layer) for layer in layers]
        plain = len(set(map(id, layers))) == len(layers) and not any(link is None for link in links)
        return Chain(cast("list[Link]", links)) if links and plain else None

    def forward(self, parameters: Sequence[Tensor], x: Tensor) -> Pass:
        """C models over their samples x, (C, n, ...)."""
        x = x.transpose(1, 2) if x.dim() > 2 else x[:, None]
        kept = []
        for link, own in self._owned(parameters):
            x, of_link = link.forward(own, x)
            kept.append(of_link)
        return Pass(x, kept)

    def gradients(self, parameters: Sequence[Tensor], passed: Pass, error: Tensor) -> list[Tensor]:
        """The gradients by all parameters, (C, *shape) each, from the error of the logits, (C, Y, n)."""
        gradients: list[Tensor] = []
        for link, kept, below in self.errors(parameters, passed, error):
            gradients = link.gradients(kept, below) + gradients
        return gradients

    def errors(self, parameters: Sequence[Tensor], passed: Pass, error: Tensor) -> Iterator[tuple[Link, Saved, Tensor]]:
        """Each link with parameters, the last first: what it kept and the error of its outputs."""
        left = len(parameters)
        for (link, own), kept in zip(reversed(list(self._owned(parameters))), reversed(passed.kept), strict=True):
            if link.parameters:
                yield link, kept, error
                left -= link.parameters
            if not left:
                return
            error = link.backward(own, kept, error)

    def _owned(self, parameters: Sequence[Tensor]) -> Iterator[tuple[Link, list[Tensor]]]:
        rest = iter(parameters)
        for link in self._links:
            yield link, list(islice(rest, link.parameters))


def _link(layer: nn.Module) -> Link | None:
    """The layer as a link; subclasses may do anything, so they do not count."""
    if type(layer) is nn.ReLU:
        return Relu()
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return Flatten()
    if type(layer) in (nn.MaxPool1d, nn.MaxPool2d):
        kernel = tiling(cast("Pool", layer))
        return MaxPool(kernel) if kernel else None
    if not is_bilinear(layer) or layer.bias is None:
        return None
    if isinstance(layer, nn.Linear):
        return Linear()
    convolution = cast("nn.Conv1d | nn.Conv2d", layer)
    return Convolution(convolution) if convolution.groups == 1 else None


def largest_of(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """The largest of each window, by one axis after the other: rows are contiguous, and then a fraction is left."""
    for axis, width in enumerate(kernel, start=x.dim() - len(kernel)):
        whole = x.shape[axis] // width * width
        x = reduce(torch.maximum, (x[(slice(None),) * axis + (slice(start, whole, width),)] for start in range(width)))
    return x


def handed_down(x: Tensor, largest: Tensor, error: Tensor, kernel: Sequence[int]) -> Tensor:
    """The error of the inputs, from that of the outputs: a window's goes to its first largest place, as in torch."""
    covered = not any(size % width for size, width in zip(x.shape[-len(kernel) :], kernel, strict=True))
    below = torch.empty_like(x) if covered else torch.zeros_like(x)
    for seen, place in zip(corners(x, kernel), corners(below, kernel), strict=True):
        part = error * (seen == largest)
        place.copy_(part)
        error = error - part
    return below


class _LargestOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, ...]) -> Tensor:
        largest = largest_of(x, kernel)
        ctx.kernel = kernel
        ctx.save_for_backward(x, largest)
        return largest

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, None]:
        x, largest = ctx.saved_tensors
        return handed_down(x, largest, error, ctx.kernel), None


class FastPool(nn.Module):
    """The pooling that it replaces, in a fraction of the time."""

    def __init__(self, pool: Pool, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self._pool, self._kernel = pool, kernel

    def forward(self, x: Tensor) -> Tensor:
        try:
            return cast("Tensor", _LargestOf.apply(x, self._kernel))  # type: ignore[no-untyped-call]
        except RuntimeError:  # within vmap, which maps over torch's own only
            return cast("Tensor", self._pool(x))


def with_fast_pools(module: nn.Module) -> nn.Module:
    """The module, its poolings replaced wherever their windows tile the input."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) in (nn.MaxPool1d, nn.MaxPool2d) and (kernel := tiling(cast("Pool", child))):
                setattr(parent, name, FastPool(cast("Pool", child), kernel))
    return module


def corners(x: Tensor, kernel: Sequence[int]) -> Iterator[Tensor]:
    """The first place of every window of x's last axes, the second of every window, and so on."""
    sizes = [size // k * k for size, k in zip(x.shape[-len(kernel) :], kernel, strict=True)]
    for start in product(*map(range, kernel)):
        places: tuple[Any, ...] = (..., *map(slice, start, sizes, kernel))
        yield x[places]


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
