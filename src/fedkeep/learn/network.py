"""A torch module whose trainable parameters are views of one flat buffer.

Loading a model is then one copy. The module also notes what its layers see: one forward and one
backward pass give all that closed forms need, the input and the error of each valued layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.random import fork_rng

from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.types import AnyArray, Vector
from fedkeep.learn.backends import Layout, require_layers
from fedkeep.learn.batched_layers import FastPool, chain_of, replaced, tiling
from fedkeep.learn.objective import Objective, as_tensor

CHUNK = 256
"""Samples per pass: enough to be efficient, few enough for their activations to stay in cache."""


class Network:
    """The module, its trainable parameters as one vector, and which of its layers are valued.

    Frozen parameters and buffers are constants: they lie outside the vector and are loaded by
    name. `lock` guards all of it.
    """

    def __init__(
        self, module: nn.Module, last_layers: int | None, objective: Objective | None = None
    ) -> None:
        for name, part in module.named_modules():
            keeps_statistics = (
                isinstance(part, _BatchNorm) or getattr(part, "running_mean", None) is not None
            )
            if keeps_statistics and not isinstance(part, FrozenNorm):
                raise FedkeepError(
                    f"layer '{name}' ({type(part).__name__}) mixes the samples of a batch and "
                    "keeps statistics outside the parameters, so no sample has a gradient of its "
                    "own: use LayerNorm instead"
                )
            if getattr(part, "inplace", False):
                part.inplace = False  # noted outputs must stay as they were
        self.objective = objective or Objective()
        trainable = {id(p) for p in module.parameters() if p.requires_grad}
        layers = [part for part in module.modules() if _own(part, trainable)]
        if not layers:
            raise ConfigError("the model has no parameters to train")
        module = module.float()
        named = {name: p for name, p in module.named_parameters() if id(p) in trainable}
        self.parameters = list(named.values())
        self.device = self.parameters[0].device
        whole = len(named) == len(list(module.parameters()))
        self.plain = self.objective.stacked and self.device.type == "cpu"
        """Whether closed forms may hold, which know a few losses and nothing else."""
        self.chain = chain_of(module) if self.plain and whole else None
        self.module = replaced(module, tiling, FastPool).eval().requires_grad_(False)
        self.lock = RLock()
        self.layout = Layout(tuple(named), tuple(tuple(p.shape) for p in self.parameters))
        self.flat = torch.cat([p.reshape(-1) for p in self.parameters])
        for parameter, view in zip(self.parameters, self.layout.views(self.flat), strict=True):
            parameter.data = view
        self.valued_layers = layers[-require_layers(last_layers, len(layers)) :]
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        owned = [[numbers[id(p)] for p in _own(layer, trainable)] for layer in self.valued_layers]
        self.head_names = [self.layout.names[number] for number in owned[-1]]
        # A tied weight stands where it is first used: all that follows it is valued, too.
        self._firsts = [min(min(own) for own in owned[place:]) for place in range(len(owned))]
        self.valued = self.layout.since(self._firsts[0])
        self.valued_parameters = self.parameters[self._firsts[0] :]
        self._loaded: object = None
        self._notes: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for layer in self.valued_layers:
            layer.register_forward_hook(self._note)

    def tail(self, layers: int | None) -> int:
        """Count the parameters of the last `layers` valued layers; None: of all that are valued."""
        return sum(map(prod, self.gradient_shapes(layers)))

    def gradient_shapes(self, layers: int | None) -> tuple[tuple[int, ...], ...]:
        """Give the shapes of these parameters, in the order in which they are flattened."""
        first = self._firsts[-require_layers(layers, len(self._firsts))]
        return self.layout.since(first).shapes

    def constants(self) -> dict[str, AnyArray]:
        """Frozen parameters and buffers by name."""
        own = self._constants()
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in own.items()}

    def load_constants(self, named: Mapping[str, AnyArray]) -> None:
        """Give frozen parameters and buffers the values of these names; other names are ignored."""
        own = self._constants()
        with self.lock:
            for name in own.keys() & named.keys():
                if own[name].shape != named[name].shape:
                    raise ConfigError(
                        f"'{name}' has shape {named[name].shape} in the model that came, "
                        f"and {tuple(own[name].shape)} in this one"
                    )
                own[name].data.copy_(as_tensor(named[name]))
            self._loaded = None

    def _constants(self) -> dict[str, Tensor]:
        trained = set(map(id, self.parameters))
        state = self.module.state_dict(keep_vars=True)
        return {
            name: tensor
            for name, tensor in state.items()
            if isinstance(tensor, Tensor) and id(tensor) not in trained
        }

    @contextmanager
    def loaded(self, model: Vector, *, frozen: bool = True) -> Iterator[None]:
        """Hold the module with these parameters.

        It costs nothing if they are frozen and were the ones loaded last.
        """
        with self.lock:
            if not frozen or self._loaded is not model:
                self.layout.require(model)
                self.flat.copy_(as_tensor(model))
                self._loaded = model if frozen else None
            yield

    @contextmanager
    def training(self, seed: int) -> Iterator[None]:
        """Hold the module in training mode: dropout acts, with random numbers from `seed`."""
        with fork_rng(devices=[]), self.differentiable(self.parameters):
            torch.default_generator.manual_seed(seed)
            self.module.train()
            try:
                yield
            finally:
                self.module.eval()

    @contextmanager
    def differentiable(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let autograd see these parameters; elsewhere outputs of layers suffice, and cost less."""
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    def observe(
        self, x: Any, noted: Sequence[nn.Module]
    ) -> tuple[Any, list[list[tuple[Tensor, Tensor]]]]:
        """Compute the outputs, and the input and output of every call of each layer `noted`.

        Autograd knows how the outputs follow from the first of those outputs.
        """
        self._notes = {id(layer): [] for layer in noted}
        try:
            return self.objective.outputs(self.module, x), list(self._notes.values())
        finally:
            self._notes = {}

    def _note(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls = self._notes.get(id(layer))
        if calls is not None:
            if isinstance(output, Tensor) and not output.requires_grad:
                output.requires_grad_()
            given = args[0].detach() if args and isinstance(args[0], Tensor) else torch.empty(0)
            calls.append((given, output))


def _own(layer: nn.Module, trainable: set[int]) -> list[nn.Parameter]:
    """List the trainable parameters of the layer itself."""
    return [p for p in layer.parameters(recurse=False) if id(p) in trainable]


class FrozenNorm(nn.Module):
    """A BatchNorm layer as it is in evaluation, with the same names."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = norm.eps, norm.weight, norm.bias
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, getattr(norm, name).clone())

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the statistics that were loaded."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        normal = (x - self.running_mean.view(shape)) * torch.rsqrt(
            self.running_var.view(shape) + self.eps
        )
        return (
            normal
            if self.weight is None
            else normal * self.weight.view(shape) + self.bias.view(shape)
        )


def with_frozen_norms(module: nn.Module) -> nn.Module:
    """Replace BatchNorm layers that keep statistics by what they are in evaluation."""
    return replaced(
        module, lambda p: isinstance(p, _BatchNorm) and p.running_mean is not None, FrozenNorm
    )


def without_statistics(module: nn.Module) -> nn.Module:
    """Let InstanceNorm layers normalise each sample by itself always, as they do in training."""

    def plain(norm: Any) -> nn.Module:
        own: nn.Module = type(norm)(norm.num_features, eps=norm.eps, affine=False)
        own.weight, own.bias = norm.weight, norm.bias
        return own

    return replaced(
        module, lambda p: isinstance(p, _InstanceNorm) and p.running_mean is not None, plain
    )
