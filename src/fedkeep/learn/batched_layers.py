"""Chains of layers over C models at once, each with its own samples, by matrix products alone.

A round's participants have a few samples each, so that calls cost more than what they compute.
Here one call does a layer for all models, without autograd, and a small convolution or pooling
takes a fraction of torch's time.
Activations are (C, channels, n, ...): a layer with a weight is then one product for each model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import islice, product
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedkeep.learn.backends import LayerFactors


class BatchedLayer(ABC):
    """One layer in one pass over inputs `x`; `own` are its parameters, (C, *shape) each."""

    def __init__(self, layer: Any, own: list[Tensor], x: Tensor) -> None:
        self.layer, self.own, self.x = layer, own, x

    @abstractmethod
    def forward(self) -> Tensor:
        """Compute the layer's outputs."""

    @abstractmethod
    def backward(self, error: Tensor) -> Tensor:
        """Compute the error of the inputs; that of the outputs may be overwritten."""


class WeightLayer(BatchedLayer):
    """One with a weight and a bias."""

    @abstractmethod
    def gradients(self, error: Tensor) -> list[Tensor]:
        """Sum the gradients by the layer's parameters over each model's samples."""

    @abstractmethod
    def factors(self, error: Tensor) -> LayerFactors:
        """Take each sample's gradient apart into its two factors."""


class Linear(WeightLayer):
    """Products have the samples as rows: with a few columns, torch's take several times as long."""

    def forward(self) -> Tensor:
        """Compute the layer's outputs."""
        weight, bias = self.own
        return torch.baddbmm(bias[:, None], self.x.mT, weight.mT).mT

    def backward(self, error: Tensor) -> Tensor:
        """Compute the error of the inputs from that of the outputs."""
        return (error.mT @ self.own[0]).mT

    def gradients(self, error: Tensor) -> list[Tensor]:
        """Sum the gradients by the layer's parameters over each model's samples."""
        return [torch.from_numpy(error.numpy() @ self.x.mT.numpy()), error.sum(2)]

    def factors(self, error: Tensor) -> LayerFactors:
        """Take each sample's gradient apart into its two factors."""
        return LayerFactors(self.x.mT.contiguous().numpy(), error.mT.contiguous().numpy())


class Convolution(WeightLayer):
    """A convolution as a linear layer over columns: what its kernel sees at each place."""

    def forward(self) -> Tensor:
        """Compute the layer's outputs."""
        weight, bias = self.own
        kernel, stride, dilation = self.layer.kernel_size, self.layer.stride, self.layer.dilation
        x = pad(self.x, [p for each in reversed(self.layer.padding) for p in (each, each)])
        (*lead, between_samples), steps = x.stride()[:3], x.stride()[3:]
        sizes = zip(x.shape[3:], kernel, stride, dilation, strict=True)
        places = [x.shape[2], *((size - d * (k - 1) - 1) // s + 1 for size, k, s, d in sizes)]
        within = [d * step for d, step in zip(dilation, steps, strict=True)]
        between = [between_samples, *(s * step for s, step in zip(stride, steps, strict=True))]
        windows = x.as_strided((*x.shape[:2], *kernel, *places), (*lead, *within, *between))
        self._columns = windows.reshape(len(x), -1, prod(places))
        z = torch.baddbmm(bias[:, :, None], weight.flatten(2), self._columns)
        return z.view(*z.shape[:2], *places)

    def backward(self, error: Tensor) -> Tensor:
        """Add up what the kernel's positions say of each input, one axis after the other."""
        layer, whole = self.layer, self.x.shape
        columns = self.own[0].flatten(2).mT @ error.flatten(2)
        part = columns.view(*whole[:2], *layer.kernel_size, *error.shape[2:])
        axes = zip(layer.kernel_size, layer.stride, layer.dilation, layer.padding, strict=True)
        for axis, (kernel, stride, dilation, padding) in enumerate(
            axes, start=-len(layer.kernel_size)
        ):
            last = stride * (part.shape[axis] - 1) + 1
            shape = list(part.shape[:2] + part.shape[3:])
            shape[axis] = whole[axis] + 2 * padding
            total = part.new_zeros(shape)
            inputs = total.movedim(axis, -1)
            for k in range(kernel):
                inputs[..., k * dilation : k * dilation + last : stride] += part[:, :, k].movedim(
                    axis, -1
                )
            part = total.narrow(axis, padding, whole[axis])
        return part

    def gradients(self, error: Tensor) -> list[Tensor]:
        """Sum the gradients by the layer's parameters over each model's samples."""
        error = error.flatten(2)
        weight = error @ self._columns.mT
        return [weight.view(*weight.shape[:2], -1, *self.layer.kernel_size), error.sum(2)]

    def factors(self, error: Tensor) -> LayerFactors:
        """Take each sample's gradient apart into its two factors."""
        errors = error.flatten(3).transpose(1, 2)
        columns = (
            self._columns.view(len(error), -1, error.shape[2], errors.shape[3])
            .transpose(1, 2)
            .mT.numpy()
        )
        *lead, outputs, inputs = *errors.shape[:3], columns.shape[3]
        gradients = np.empty((*lead, outputs * (inputs + 1)), dtype=np.float32)
        weight, bias = gradients[..., : outputs * inputs], gradients[..., outputs * inputs :]
        # By numpy: torch would copy both first.
        np.matmul(errors.numpy(), columns, out=weight.reshape(*lead, outputs, inputs))
        bias[:] = errors.sum(3)
        return LayerFactors(gradients, np.ones((*lead, 1), dtype=np.float32), bias=False)


class Relu(BatchedLayer):
    """A rectifier."""

    def forward(self) -> Tensor:
        """Compute the layer's outputs."""
        self.x = self.x.relu()  # all it must know of its inputs is which were positive
        return self.x

    def backward(self, error: Tensor) -> Tensor:
        """Compute the error of the inputs from that of the outputs."""
        return error.mul_(self.x > 0)


class MaxPool(BatchedLayer):
    """A pooling of windows that tile the input."""

    def forward(self) -> Tensor:
        """Compute the layer's outputs."""
        self._largest = largest_of(self.x, tiling(self.layer))
        return self._largest

    def backward(self, error: Tensor) -> Tensor:
        """Compute the error of the inputs from that of the outputs."""
        return handed_down(self.x, self._largest, error, tiling(self.layer))


class Flatten(BatchedLayer):
    """All axes of a sample as one."""

    def forward(self) -> Tensor:
        """Compute the layer's outputs."""
        return self.x.movedim(2, -1).reshape(len(self.x), -1, self.x.shape[2])

    def backward(self, error: Tensor) -> Tensor:
        """Compute the error of the inputs from that of the outputs."""
        shape = self.x.shape
        return error.view(*shape[:2], *shape[3:], shape[2]).movedim(-1, 2)


Chain: TypeAlias = list[tuple[type[BatchedLayer], nn.Module]]
"""The layers of a module that is nothing but a chain of them, each with what does its work here."""


def chain_of(module: nn.Module) -> Chain | None:
    """Take a module apart as a chain; None if any part of it is something else."""
    plain = type(module) is nn.Sequential and not any(map(_has_hooks, module.modules()))
    layers = list(module) if plain else []  # type: ignore[call-overload]
    known = [(kind, layer) for layer in layers if (kind := _kind(layer)) is not None]
    return known if known and len(known) == len(set(map(id, layers))) == len(layers) else None


def _kind(layer: Any) -> type[BatchedLayer] | None:
    """Find what does the work of this layer; subclasses may do anything and do not count."""
    if type(layer) is nn.ReLU:
        return Relu
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return Flatten
    if tiling(layer):
        return MaxPool
    if not is_bilinear(layer) or layer.bias is None:
        return None
    if isinstance(layer, nn.Linear):
        return Linear
    return Convolution if layer.groups == 1 else None


def is_bilinear(layer: Any) -> bool:
    """Whether its output is bilinear in input and weight, for which there are closed forms."""
    if type(layer) not in (nn.Linear, nn.Conv1d, nn.Conv2d):
        return False
    if dict(layer.named_parameters(recurse=False)).keys() - {"weight", "bias"}:
        return False  # its weight is made of others, as by torch.nn.utils.weight_norm
    if isinstance(layer, nn.Linear):
        return True
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _has_hooks(layer: nn.Module) -> bool:
    """Whether more happens in a call than the layer itself does."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


class Pass:
    """A forward pass of C models.

    From their parameters, (C, *shape) each, and samples x, (C, n, ...), to logits, (C, Y, n).
    """

    def __init__(self, chain: Chain, parameters: Sequence[Tensor], x: Tensor) -> None:
        rest = iter(parameters)
        self.layers: list[BatchedLayer] = []
        self.logits = x.transpose(1, 2) if x.dim() > 2 else x[:, None]
        for kind, layer in chain:
            own = list(islice(rest, 2 if issubclass(kind, WeightLayer) else 0))
            self.layers.append(kind(layer, own, self.logits))
            self.logits = self.layers[-1].forward()

    def gradients(self, error: Tensor) -> list[Tensor]:
        """Compute the gradients by all parameters, (C, *shape) each, from the logits' error."""
        gradients: list[Tensor] = []
        for layer, of_outputs in self.errors(error):
            gradients = layer.gradients(of_outputs) + gradients
        return gradients

    def errors(self, error: Tensor) -> Iterator[tuple[WeightLayer, Tensor]]:
        """Each layer with parameters, the last first, and the error of its outputs."""
        first = next((layer for layer in self.layers if layer.own), None)
        for layer in reversed(self.layers):
            if isinstance(layer, WeightLayer):
                yield layer, error
            if layer is first:
                return
            error = layer.backward(error)


def largest_of(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Find the largest of each window, by one axis after the other.

    Rows are contiguous, and then a fraction is left.
    """
    for axis, width in enumerate(kernel, start=x.dim() - len(kernel)):
        whole = x.shape[axis] // width * width
        x = reduce(
            torch.maximum,
            (x[(slice(None),) * axis + (slice(start, whole, width),)] for start in range(width)),
        )
    return x


def handed_down(x: Tensor, largest: Tensor, error: Tensor, kernel: Sequence[int]) -> Tensor:
    """Compute the error of the inputs: a window's goes to its first largest place, as in torch."""
    sizes = x.shape[-len(kernel) :]
    whole = [size // width * width for size, width in zip(sizes, kernel, strict=True)]
    below = torch.empty_like(x) if list(sizes) == whole else torch.zeros_like(x)
    for start in product(*map(range, kernel)):
        # The first place of every window, the second of every window, and so on.
        places: tuple[Any, ...] = (..., *map(slice, start, whole, kernel))
        part = error * (x[places] == largest)
        below[places] = part
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

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self._pool, self._kernel = pool, tiling(pool)

    def forward(self, x: Tensor) -> Any:
        """Compute the layer's outputs."""
        try:
            return _LargestOf.apply(x, self._kernel)  # type: ignore[no-untyped-call]
        except RuntimeError:  # within vmap, which maps over torch's own only
            return self._pool(x)


def replaced(
    module: nn.Module, old: Callable[[Any], Any], new: Callable[[Any], nn.Module]
) -> nn.Module:
    """Replace every part of a module that is `old`."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if old(child):
                setattr(parent, name, new(child))
    return module


def tiling(pool: Any) -> tuple[int, ...]:
    """Find the sizes of a pooling's windows; none unless they tile the input."""
    if type(pool) not in (nn.MaxPool1d, nn.MaxPool2d):
        return ()
    axes = 1 if isinstance(pool, nn.MaxPool1d) else 2
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    kernel, stride, padding, dilation = (s if isinstance(s, tuple) else (s,) * axes for s in sizes)
    tiles = kernel == stride and not any(padding) and set(dilation) == {1}
    return kernel if tiles and not pool.ceil_mode and not pool.return_indices else ()
