"""A torch module whose parameters are views of one flat buffer, and which notes what its layers see.

Loading a model is then one copy, and one forward and one backward pass give all that the closed forms of
`fedkeep.learn.layers` need: the input and the error of each valued layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.types import AnyArray, Vector
from fedkeep.learn.chain import Chain, with_fast_pools
from fedkeep.learn.flat import Layout, require_layers
from fedkeep.learn.layers import Placed, as_tensor, factors_of, output_error
from fedkeep.learn.measurements import Outer

CHUNK = 256
"""Samples per pass: enough to be efficient, few enough for what layers see of them to stay in the cache."""


class Network:
    """The module, its layout, and which of its layers are valued; `lock` guards all of it."""

    def __init__(self, module: nn.Module, last_layers: int | None) -> None:
        refuse_coupling(module)
        for part in module.modules():
            if getattr(part, "inplace", False):
                part.inplace = False  # type: ignore[assignment]  # noted outputs must stay as they were
        self.chain = Chain.of(module)
        self.module = with_fast_pools(module.float())
        self.lock = RLock()
        named = list(self.module.named_parameters())
        self.parameters = [parameter for _, parameter in named]
        self.layout = Layout(tuple(name for name, _ in named), tuple(tuple(p.shape) for p in self.parameters))
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        for parameter, where in zip(self.parameters, self.layout.slices, strict=True):
            parameter.data = self.flat[where].view(parameter.shape)
        self.valued_layers = _last_layers(self.module, last_layers)
        first = self._first_parameter(self.valued_layers[0])
        self.valued = self.layout.since(first)
        self.valued_parameters = self.parameters[first:]
        self._loaded: object = None
        self._notes: dict[int, list[tuple[Tensor, Tensor]]] | None = None
        for layer in self.valued_layers:
            layer.register_forward_hook(self._note)
        self.prepare(training=False)

    @property
    def head(self) -> nn.Module:
        """The last layer that has parameters."""
        return self.valued_layers[-1]

    def tail(self, layers: int | None) -> int:
        """How many parameters the last `layers` valued layers have; None: all that are valued."""
        depth = require_layers(layers, len(self.valued_layers))
        return self.layout.since(self._first_parameter(self.valued_layers[-depth])).size

    def load_statistics(self, named: Mapping[str, AnyArray]) -> None:
        """Gives frozen layers the statistics of these names; other names are not theirs."""
        own = dict(self.module.named_buffers())
        with self.lock:
            for name in own.keys() & named.keys():
                own[name].copy_(as_tensor(named[name]))
            self._loaded = None

    def load(self, model: Vector, *, frozen: bool = False) -> None:
        """Makes `model` the parameters; free of charge where it is frozen and was the one loaded last."""
        if frozen and self._loaded is model:
            return
        self.layout.require(model)
        self.flat.copy_(as_tensor(model))
        self._loaded = model if frozen else None

    @contextmanager
    def loaded(self, model: Vector) -> Iterator[None]:
        """Holds the module with a model that does not change any more as its parameters."""
        with self.lock:
            self.load(model, frozen=True)
            yield

    def prepare(self, *, training: bool) -> None:
        """Dropout and the like act in training only; outside it, no gradient by parameters is recorded."""
        self.module.train(training)
        for parameter in self.parameters:
            parameter.requires_grad_(training)

    @contextmanager
    def training(self, seed: int) -> Iterator[None]:
        """Holds the module in training mode, drawing its random numbers from `seed`."""
        with self.lock, seeded(seed):
            self.prepare(training=True)
            try:
                yield
            finally:
                self.prepare(training=False)

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        """Lets autograd see the valued parameters themselves, where outputs of layers do not suffice."""
        for parameter in self.valued_parameters:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in self.valued_parameters:
                parameter.requires_grad_(False)

    def record(self, x: Tensor, y: Tensor, noted: Sequence[nn.Module]) -> tuple[Tensor, list[Outer | Placed]]:
        """The logits, and each sample's gradients by the bilinear layers `noted`: of a forward and a backward pass.

        Autograd starts at the first noted output; where that is the logits, nothing is left for it to do.
        """
        graph, calls = self.observe(x, noted)
        if any(len(of_layer) != 1 for of_layer in calls):
            raise RuntimeError("a valued layer was not called exactly once")
        logits = graph.detach()
        error = output_error(logits, y)
        inputs, outputs = zip(*(of_layer[0] for of_layer in calls), strict=True)
        errors = [error] if outputs[-1] is graph else []
        below = outputs[: len(outputs) - len(errors)]
        if below:
            # of a sum: given the error as it is, torch would first load half a second's worth of symbolic mathematics
            errors = [*torch.autograd.grad((graph * error).sum(), below), *errors]
        return logits, list(map(factors_of, noted, inputs, errors))

    def observe(self, x: Tensor, noted: Sequence[nn.Module]) -> tuple[Tensor, list[list[tuple[Tensor, Tensor]]]]:
        """The logits, and the input and output of every call of each layer `noted`.

        Autograd knows how the logits follow from the first of those outputs.
        """
        self._notes = {id(layer): [] for layer in noted}
        try:
            return self.module(x), list(self._notes.values())
        finally:
            self._notes = None

    def _first_parameter(self, layer: nn.Module) -> int:
        own = _own_parameters(layer)[0]
        return next(i for i, parameter in enumerate(self.parameters) if parameter is own)

    def _note(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls = None if self._notes is None else self._notes.get(id(layer))
        if calls is not None:
            if isinstance(output, Tensor) and not output.requires_grad:
                output.requires_grad_()
            calls.append((args[0].detach(), output))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Gives torch's global generator a seed for a while, and its own state back."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


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


def refuse_coupling(module: nn.Module) -> None:
    """Raises for layers in which one sample's loss depends on the others of its batch."""
    for name, part in module.named_modules():
        if isinstance(part, FrozenNorm):
            continue
        if isinstance(part, _BatchNorm) or getattr(part, "running_mean", None) is not None:
            raise FedkeepError(
                f"layer '{name}' ({type(part).__name__}) mixes the samples of a batch and keeps statistics "
                "outside the parameters, so no sample has a gradient of its own: use LayerNorm instead"
            )


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _last_layers(module: nn.Module, count: int | None) -> list[nn.Module]:
    """The last `count` layers with parameters of their own, in the order of the flat vector."""
    layers = [part for part in module.modules() if _own_parameters(part)]
    if not layers:
        raise ConfigError("the model has no parameters to train")
    return layers[-require_layers(count, len(layers)) :]
