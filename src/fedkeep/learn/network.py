"""A torch module whose parameters are views of one flat buffer, and which notes what its layers see.

Loading a model is then one copy, and one forward and one backward pass give all that closed forms need: the input
and the error of each valued layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from threading import RLock
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.random import fork_rng

from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.types import AnyArray, Vector
from fedkeep.learn.backends import Layout, require_layers
from fedkeep.learn.batched_layers import FastPool, chain_of, replaced, tiling

CHUNK = 256
"""Samples per pass: enough to be efficient, few enough for what layers see of them to stay in the cache."""
_MINUS_ONE = torch.tensor(-1.0)
losses = partial(F.cross_entropy, reduction="none")
"""The loss of each sample, (n,), from logits and labels; autograd and vmap can go through it."""


def as_tensor(array: AnyArray) -> Tensor:
    """The array as a tensor, floats as float32; copied only where it must be: torch wants writable memory."""
    if array.dtype.kind == "f" and array.dtype != "float32":
        array = array.astype("float32")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def output_error(logits: Tensor, y: Tensor) -> Tensor:
    """The gradient of each sample's loss by its logits, softmax(z) - onehot(y); classes are axis 1."""
    index = y[:, None]
    return torch.softmax(logits, dim=1).scatter_add_(1, index, _MINUS_ONE.expand(index.shape))


class Network:
    """The module, its layout, and which of its layers are valued; `lock` guards all of it."""

    def __init__(self, module: nn.Module, last_layers: int | None) -> None:
        for name, part in module.named_modules():
            keeps_statistics = (
                isinstance(part, _BatchNorm) or getattr(part, "running_mean", None) is not None
            )
            if keeps_statistics and not isinstance(part, FrozenNorm):
                raise FedkeepError(
                    f"layer '{name}' ({type(part).__name__}) mixes the samples of a batch and keeps statistics "
                    "outside the parameters, so no sample has a gradient of its own: use LayerNorm instead"
                )
            if getattr(part, "inplace", False):
                part.inplace = False  # noted outputs must stay as they were
        layers = [part for part in module.modules() if list(part.parameters(recurse=False))]
        if not layers:
            raise ConfigError("the model has no parameters to train")
        self.chain = chain_of(module)
        self.module = replaced(module.float(), tiling, FastPool).eval().requires_grad_(False)
        self.lock = RLock()
        named = dict(self.module.named_parameters())
        self.parameters = list(named.values())
        self.layout = Layout(tuple(named), tuple(tuple(p.shape) for p in self.parameters))
        self.flat = torch.cat([p.reshape(-1) for p in self.parameters])
        for parameter, view in zip(self.parameters, self.layout.views(self.flat), strict=True):
            parameter.data = view
        self.valued_layers = layers[-require_layers(last_layers, len(layers)) :]
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._firsts = [
            numbers[id(next(layer.parameters(recurse=False)))] for layer in self.valued_layers
        ]
        self.valued = self.layout.since(self._firsts[0])
        self.valued_parameters = self.parameters[self._firsts[0] :]
        self._loaded: object = None
        self._notes: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for layer in self.valued_layers:
            layer.register_forward_hook(self._note)

    def tail(self, layers: int | None) -> int:
        """How many parameters the last `layers` valued layers have; None: all that are valued."""
        return sum(map(prod, self.gradient_shapes(layers)))

    def gradient_shapes(self, layers: int | None) -> tuple[tuple[int, ...], ...]:
        """The shapes of these parameters."""
        first = self._firsts[-require_layers(layers, len(self._firsts))]
        return self.layout.since(first).shapes

    def load_statistics(self, named: Mapping[str, AnyArray]) -> None:
        """Gives frozen layers the statistics of these names; other names are not theirs."""
        own = dict(self.module.named_buffers())
        with self.lock:
            for name in own.keys() & named.keys():
                own[name].copy_(as_tensor(named[name]))
            self._loaded = None

    @contextmanager
    def loaded(self, model: Vector, *, frozen: bool = True) -> Iterator[None]:
        """Holds the module with these parameters; free of charge if they are frozen and were the ones loaded last."""
        with self.lock:
            if not frozen or self._loaded is not model:
                self.layout.require(model)
                self.flat.copy_(as_tensor(model))
                self._loaded = model if frozen else None
            yield

    @contextmanager
    def training(self, seed: int) -> Iterator[None]:
        """Holds the module in training mode, in which dropout and the like act, drawing random numbers from `seed`."""
        with fork_rng(devices=[]), self.differentiable(self.parameters):
            torch.default_generator.manual_seed(seed)
            self.module.train()
            try:
                yield
            finally:
                self.module.eval()

    @contextmanager
    def differentiable(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Lets autograd see these parameters; elsewhere the outputs of layers suffice, and cost less."""
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    def observe(
        self, x: Tensor, noted: Sequence[nn.Module]
    ) -> tuple[Tensor, list[list[tuple[Tensor, Tensor]]]]:
        """The logits, and the input and output of every call of each layer `noted`.

        Autograd knows how the logits follow from the first of those outputs.
        """
        self._notes = {id(layer): [] for layer in noted}
        try:
            return self.module(x), list(self._notes.values())
        finally:
            self._notes = {}

    def _note(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls = self._notes.get(id(layer))
        if calls is not None:
            if isinstance(output, Tensor) and not output.requires_grad:
                output.requires_grad_()
            calls.append((args[0].detach(), output))


class FrozenNorm(nn.Module):
    """What a BatchNorm layer is in evaluation mode, with parameters and statistics of the same names."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = norm.eps, norm.weight, norm.bias
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, getattr(norm, name).clone())

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        normal = (x - self.running_mean.view(shape)) * torch.rsqrt(
            self.running_var.view(shape) + self.eps
        )
        return (
            normal
            if self.weight is None
            else normal * self.weight.view(shape) + self.bias.view(shape)
        )


def with_frozen_norms(factory: Callable[[], nn.Module]) -> nn.Module:
    """A new module of the factory, its BatchNorm layers frozen wherever they have statistics."""
    kept = lambda part: isinstance(part, _BatchNorm) and part.running_mean is not None  # noqa: E731
    return replaced(factory(), kept, FrozenNorm)
