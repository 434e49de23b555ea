"""What a torch model sees in a batch: by closed forms where they hold, else by autograd alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedkeep.core.gradients.layout import Block
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Batch, Scores, Vector
from fedkeep.learn.backends import BatchMeasurements, FactoredMeasurements, Outer, padded
from fedkeep.learn.batched_layers import Pass
from fedkeep.learn.network import Network, as_tensor, losses, output_error

_BLOCK = 1 << 20
"""Numbers of per-sample gradients held at a time."""


@dataclass(frozen=True, eq=False)
class Placed(Outer):
    """A weight that is used at several places of a sample: that of a convolution, or of a linear layer along a row."""

    layer: Any = None

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.layer.parameters())

    def inner(self, other: Outer) -> AnyArray:
        """From the gradients themselves: what a sample's places say is summed before anything is made of it."""
        theirs = of_kind(Placed, other)
        return _inner_products(self._gradients(), None if theirs is self else theirs._gradients())

    def project(self, direction: Vector) -> AnyArray:
        """As <e, layer(a)>, with the direction in place of the layer's own weight and bias."""
        weight = self.layer.weight
        toward, rest = as_tensor(direction).tensor_split([weight.numel()])
        own = toward.view(weight.shape), rest if self.bias else None
        linear = isinstance(self.layer, nn.Linear)
        response = (
            F.linear(self.a, *own) if linear else torch.convolution(self.a, *own, *self._geometry())
        )
        response *= self.e
        return response.sum(tuple(range(1, response.dim()))).numpy()

    def add_up(self, shares: Vector, out: Vector) -> None:
        e = self.e * as_tensor(shares).view(-1, *[1] * (self.e.dim() - 1))
        torch.cat(
            [gradient.reshape(-1) for gradient in self._summed(self.a, e)],
            out=torch.from_numpy(out),
        )

    def represent(self, shares: Vector, blocks: Sequence[Block]) -> Iterator[Vector]:
        """Represent sum_i shares_i grad_i in the blocks of the layer's parameters."""
        if not isinstance(self.layer, nn.Linear):
            yield from self._represent_sum(shares, blocks)
            return
        e = self.e * as_tensor(shares).view(-1, *[1] * (self.e.dim() - 1))
        a, e = self.a.flatten(0, -2), e.flatten(0, -2)
        yield blocks[0].of_products(e.numpy(), a.numpy())
        if self.bias:
            yield e.sum(0).numpy()

    def _summed(self, a: Tensor, e: Tensor) -> list[Tensor]:
        """The gradients of the weight and, where there is one, the bias, summed over these samples."""
        layer = self.layer
        if isinstance(layer, nn.Linear):
            a, e = a.flatten(0, -2), e.flatten(0, -2)
            return [e.T @ a, e.sum(0)] if self.bias else [e.T @ a]
        shape, wanted = [layer.out_channels], [False, True, self.bias]
        back = torch.ops.aten.convolution_backward(
            e, a, layer.weight, shape, *self._geometry(), wanted
        )
        return list(back[1 : 2 + self.bias])

    def _gradients(self) -> Iterator[list[Tensor]]:
        """Each sample's gradient by weight and bias, (n, *shape), for a few samples at a time."""
        step = max(1, _BLOCK // self.layer.weight.numel())
        of_each = vmap(self._summed)
        for a, e in zip(torch.split(self.a, step), torch.split(self.e, step), strict=True):
            yield of_each(a[:, None], e[:, None])

    def _geometry(self) -> tuple[Any, ...]:
        """Stride, padding and dilation, not transposed, no output padding, and groups of a convolution."""
        layer = self.layer
        return (
            layer.stride,
            layer.padding,
            layer.dilation,
            False,
            [0] * len(layer.stride),
            layer.groups,
        )


class TorchMeasurements(FactoredMeasurements):
    """The closed forms of linear and convolutional layers, from what they see in a pass of the module itself."""

    def __init__(self, network: Network, model: Vector, batch: Batch) -> None:
        self._network, self._model, self._batch, self._n = network, model, batch, len(batch)
        self._logits = torch.empty(0)
        self._noted: list[Outer] = []

    def losses(self) -> Scores:
        self._last(1)
        return losses(self._logits, as_tensor(self._batch.y)).double().numpy()

    def activations(self) -> AnyArray:
        return torch.as_tensor(self._last(1)[-1].a).flatten(1).numpy()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(factors.a.nbytes + factors.e.nbytes for factors in self._noted)

    def _last(self, wanted: int | None = None) -> list[Outer]:
        """By a forward and a backward pass, which gives the logits too.

        Autograd starts at the first noted output; where that is the logits, nothing is left for it to do.
        """
        network = self._network
        layers = network.valued_layers[-(wanted or 0) :]
        if len(self._noted) >= len(layers):
            return self._noted
        with network.loaded(self._model):
            graph, calls = network.observe(as_tensor(self._batch.x), layers)
            if any(len(of_layer) != 1 for of_layer in calls):
                raise RuntimeError("a valued layer was not called exactly once")
            self._logits = graph.detach()
            error = output_error(self._logits, as_tensor(self._batch.y))
            inputs, outputs = zip(*(of_layer[0] for of_layer in calls), strict=True)
            errors = [error] if outputs[-1] is graph else []
            if below := outputs[: len(outputs) - len(errors)]:
                # of a sum: given the error as it is, torch would first load half a second's worth of symbolic math
                errors = [*torch.autograd.grad((graph * error).sum(), below), *errors]
        self._noted = []
        for layer, a, e in zip(layers, inputs, errors, strict=True):
            biased, plain = layer.bias is not None, isinstance(layer, nn.Linear) and a.dim() == 2
            self._noted.append(
                Outer(a.numpy(), e.numpy(), biased) if plain else Placed(a, e, biased, layer)
            )
        return self._noted


class ChainTrace:
    """Of a chain of layers: C models, each over its own few samples, in one pass."""

    def __init__(
        self, network: Network, models: Sequence[Vector], batches: Sequence[Batch]
    ) -> None:
        self._network, self._batches = network, batches
        self._y = as_tensor(padded([batch.y for batch in batches]))
        shared = all(model is models[0] for model in models)
        whole = (
            as_tensor(models[0]).expand(len(models), -1) if shared else as_tensor(np.stack(models))
        )
        self._parameters: list[Tensor] = network.layout.views(whole)

    @cached_property
    def losses(self) -> AnyArray:
        return losses(self._passed.logits, self._y).numpy()

    @cached_property
    def activations(self) -> AnyArray:
        return self._passed.links[-1].x.mT.numpy()

    @cached_property
    def head(self) -> Outer:
        return Outer(self.activations, self._error.mT.numpy())

    @cached_property
    def valued(self) -> list[Outer]:
        links = islice(self._passed.errors(self._error), len(self._network.valued_layers))
        factors = [link.factors(error) for link, error in links][::-1]
        # The activations of all layers are much larger than what is made of them.
        del self._passed.links[:-1]
        return factors

    @cached_property
    def _passed(self) -> Pass:
        x = as_tensor(padded([batch.x for batch in self._batches]))
        return Pass(self._network.chain or [], self._parameters, x)

    @cached_property
    def _error(self) -> Tensor:
        return output_error(self._passed.logits, self._y)


class AutogradMeasurements(BatchMeasurements):
    """The same quantities by autograd alone: slower, and right for all that autograd differentiates twice.

    Where it is differentiated twice or mapped over, fused attention kernels, which cannot be, are left out.
    """

    def __init__(self, network: Network, model: Vector, batch: Batch) -> None:
        self._network, self._loaded, self._n = network, partial(network.loaded, model), len(batch)
        self._x, self._y = as_tensor(batch.x), as_tensor(batch.y)

    def losses(self) -> Scores:
        with self._loaded():
            return self._losses().detach().double().numpy()

    def projections(self, direction: Vector) -> Scores:
        """<grad_i, direction>, as the derivative of <sum_i v_i grad_i, direction> by v."""
        network, parameters = self._network, self._network.valued_parameters
        tangents = network.valued.views(as_tensor(direction))
        with self._loaded(), sdpa_kernel(SDPBackend.MATH):
            with network.differentiable(parameters):
                found = self._losses()
                v = torch.ones_like(found, requires_grad=True)
                mixed = torch.autograd.grad(
                    found, parameters, v, create_graph=True, materialize_grads=True
                )
            used = [
                (part, tangent)
                for part, tangent in zip(mixed, tangents, strict=True)
                if part.requires_grad
            ]
            parts, along = zip(*used, strict=True)
            return torch.autograd.grad(parts, v, along)[0].double().numpy()

    def inner(self, other: PerSampleGradients) -> Scores:
        return self._inner(of_kind(AutogradMeasurements, other), self._network.valued.names)

    def head_norms(self) -> Scores:
        own = len(list(self._network.valued_layers[-1].parameters(recurse=False)))
        return np.sqrt(self._inner(self, self._network.valued.names[-own:]))

    def weighted_gradient(self, weights: Scores) -> Vector:
        shares, parameters = as_tensor(weights / max(1, self._n)), self._network.valued_parameters
        with self._loaded(), self._network.differentiable(parameters):
            parts = torch.autograd.grad(self._losses() @ shares, parameters, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts]).numpy()

    def activations(self) -> AnyArray:
        network = self._network
        with self._loaded(), torch.no_grad():  # or no output could be changed in place
            _, [calls] = network.observe(self._x, network.valued_layers[-1:])
        return calls[-1][0].flatten(1).numpy()

    def _losses(self) -> Tensor:
        return losses(self._network.module(self._x), self._y)

    def _inner(self, other: "AutogradMeasurements", names: Sequence[str]) -> Scores:
        """<grad_i, grad'_i> over the parameters `names`, from the gradients of a few samples at a time."""
        size = max(
            1, 2 * _BLOCK // sum(self._network.module.get_parameter(name).numel() for name in names)
        )
        theirs = None if other is self else other._gradients(size, names)
        return _inner_products(self._gradients(size, names), theirs)

    def _gradients(self, size: int, names: Sequence[str]) -> Iterator[list[Tensor]]:
        """The gradient of every sample by each parameter of `names`, (n, *shape), `size` samples at a time."""
        module = self._network.module
        of_one = grad(
            lambda own, x, y: losses(functional_call(module, own, (x[None],)), y[None])[0]
        )
        for x, y in zip(torch.split(self._x, size), torch.split(self._y, size), strict=True):
            with self._loaded(), sdpa_kernel(SDPBackend.MATH):
                own = {name: module.get_parameter(name).detach() for name in names}
                try:
                    found = list(vmap(of_one, (None, 0, 0))(own, x, y).values())
                except (
                    RuntimeError
                ):  # not every layer can be mapped over (recurrent ones, for instance)
                    singles = [of_one(own, *pair) for pair in zip(x, y, strict=True)]
                    found = [torch.stack([single[name] for single in singles]) for name in names]
            yield found


def _inner_products(mine: Iterator[list[Tensor]], theirs: Iterator[list[Tensor]] | None) -> Scores:
    """<grad_i, grad'_i> per sample, from the gradients by each parameter, (n, ...), of a few samples at a time.

    Without `theirs` it is the squared norms: gradients are made once then.
    """
    pairs = ((g, g) for g in mine) if theirs is None else zip(mine, theirs, strict=True)
    parts = [
        [(g.double() * h.double()).flatten(1).sum(1) for g, h in zip(*pair, strict=True)]
        for pair in pairs
    ]
    return torch.cat([torch.stack(part).sum(0) for part in parts]).numpy()
