"""What a torch model sees in a batch: by closed forms where they hold, else by autograd alone."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from fedkeep.core.gradients.layout import Block
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Batch, Scores, Vector
from fedkeep.learn.backends import BatchMeasurements, FactoredMeasurements, LayerFactors, padded
from fedkeep.learn.batched_layers import Pass
from fedkeep.learn.network import Network
from fedkeep.learn.objective import as_tensor, closed_error, closed_losses

_BLOCK = 1 << 20
"""Numbers of per-sample gradients held at a time."""


@dataclass(frozen=True, eq=False)
class SharedWeightFactors(LayerFactors):
    """A weight used at several places of a sample: a convolution's, or that of tokens."""

    layer: Any = None

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(parameter.numel() for parameter in self.layer.parameters())

    def inner(self, other: LayerFactors) -> AnyArray:
        """<grad_i, grad'_i> from the gradients themselves: a sample's places are summed first."""
        theirs = of_kind(SharedWeightFactors, other)
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
        """Write the samples' gradients, multiplied by their shares and summed, into `out`."""
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
        """Sum the gradients by the weight and, where there is one, the bias."""
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
        """Stride, padding, dilation, not transposed, no output padding, and groups."""
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
    """Closed forms of linear and convolutional layers, from what they see in a pass."""

    def __init__(self, network: Network, model: Vector, batch: Batch) -> None:
        self._network, self._model, self._batch, self._n = network, model, batch, len(batch)
        self._logits = torch.empty(0)
        self._noted: list[LayerFactors] = []

    def losses(self) -> Scores:
        """Compute the loss of each sample."""
        self._last(1)
        y = as_tensor(self._batch.y)
        return closed_losses(self._network.objective.closed, self._logits, y).double().numpy()

    def activations(self) -> AnyArray:
        """Give the inputs of the last layer, (n, d)."""
        return torch.as_tensor(self._last(1)[-1].a).flatten(1).numpy()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes that are kept for later questions."""
        return sum(factors.a.nbytes + factors.e.nbytes for factors in self._noted)

    def _last(self, wanted: int | None = None) -> list[LayerFactors]:
        """By a forward and a backward pass, which gives the logits too.

        Autograd starts at the first noted output; where that is the logits, nothing is left to do.
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
            closed = network.objective.closed
            error = closed_error(closed, self._logits, as_tensor(self._batch.y))
            inputs, outputs = zip(*(of_layer[0] for of_layer in calls), strict=True)
            errors = [error] if outputs[-1] is graph else []
            if below := outputs[: len(outputs) - len(errors)]:
                # Of a sum: given the error as it is, torch would first load its symbolic math.
                errors = [*torch.autograd.grad((graph * error).sum(), below), *errors]
        self._noted = []
        for layer, a, e in zip(layers, inputs, errors, strict=True):
            biased, plain = layer.bias is not None, isinstance(layer, nn.Linear) and a.dim() == 2
            self._noted.append(
                LayerFactors(a.numpy(), e.numpy(), biased)
                if plain
                else SharedWeightFactors(a, e, biased, layer)
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
        """Compute the loss of each sample."""
        closed = self._network.objective.closed
        found: AnyArray = closed_losses(closed, self._passed.logits, self._y).numpy()
        return found

    @cached_property
    def activations(self) -> AnyArray:
        """Give the inputs of the last layer, (n, d)."""
        return self._passed.layers[-1].x.mT.numpy()

    @cached_property
    def head(self) -> LayerFactors:
        """Factors of the last layer."""
        return LayerFactors(self.activations, self._error.mT.numpy())

    @cached_property
    def valued(self) -> list[LayerFactors]:
        """Factors of the valued layers."""
        layers = islice(self._passed.errors(self._error), len(self._network.valued_layers))
        factors = [layer.factors(error) for layer, error in layers][::-1]
        # The activations of all layers are much larger than what is made of them.
        del self._passed.layers[:-1]
        return factors

    @cached_property
    def _passed(self) -> Pass:
        x = as_tensor(padded([batch.x for batch in self._batches]))
        return Pass(self._network.chain or [], self._parameters, x)

    @cached_property
    def _error(self) -> Tensor:
        return closed_error(self._network.objective.closed, self._passed.logits, self._y)


class AutogradMeasurements(BatchMeasurements):
    """The same quantities by autograd alone: slower, and right for any differentiable loss.

    Where it is differentiated twice or mapped over, fused attention kernels, which cannot be, are
    left out. A module that cannot be mapped over, or differentiated twice, is asked sample by
    sample.
    """

    def __init__(self, network: Network, model: Vector, batch: Batch) -> None:
        self._network, self._loaded, self._n = network, partial(network.loaded, model), len(batch)
        self._batch = batch
        self._x, self._y = network.objective.read(batch, network.device)

    def losses(self) -> Scores:
        """Loss of each sample."""
        with self._loaded():
            return self._losses().detach().double().cpu().numpy()

    def projections(self, direction: Vector) -> Scores:
        """<grad_i, direction>, as the derivative of <sum_i v_i grad_i, direction> by v."""
        network, parameters = self._network, self._network.valued_parameters
        tangents = network.valued.views(as_tensor(direction).to(network.device))
        try:
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
                return torch.autograd.grad(parts, v, along)[0].double().cpu().numpy()
        except RuntimeError:  # a part that cannot be differentiated twice
            names = network.valued.names
            toward = [tangent[None] for tangent in tangents]
            projected = [
                _row_products(own, toward) for own in self._gradients(self._chunk(names), names)
            ]
            return torch.cat(projected).cpu().numpy()

    def inner(self, other: PerSampleGradients) -> Scores:
        """<grad_i, grad'_i> of each sample."""
        return self._inner(of_kind(AutogradMeasurements, other), self._network.valued.names)

    def head_norms(self) -> Scores:
        """Norm of each sample's gradient by the parameters of the last layer."""
        return np.sqrt(self._inner(self, self._network.head_names))

    def weighted_gradient(self, weights: Scores) -> Vector:
        """Average the samples' gradients, each multiplied by its weight."""
        shares = as_tensor(weights / max(1, self._n)).to(self._network.device)
        parameters = self._network.valued_parameters
        with self._loaded(), self._network.differentiable(parameters):
            weighted = (self._losses() * shares).sum()
            parts = torch.autograd.grad(weighted, parameters, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts]).cpu().numpy()

    def activations(self) -> AnyArray:
        """Give the inputs of the last layer, (n, d)."""
        network = self._network
        with self._loaded(), torch.no_grad():  # or no output could be changed in place
            _, [calls] = network.observe(self._x, network.valued_layers[-1:])
        return calls[-1][0].flatten(1).cpu().numpy()

    def _losses(self) -> Tensor:
        return self._network.objective.losses(self._network.module, self._x, self._y)

    def _chunk(self, names: Sequence[str]) -> int:
        """How many samples' gradients by these parameters are held at a time."""
        numbers = sum(self._network.module.get_parameter(name).numel() for name in names)
        return max(1, 2 * _BLOCK // numbers)

    def _inner(self, other: "AutogradMeasurements", names: Sequence[str]) -> Scores:
        """<grad_i, grad'_i> over the parameters `names`, a few samples at a time."""
        size = self._chunk(names)
        theirs = None if other is self else other._gradients(size, names)
        return _inner_products(self._gradients(size, names), theirs)

    def _gradients(self, size: int, names: Sequence[str]) -> Iterator[list[Tensor]]:
        """Compute each sample's gradient by each of `names`, (n, *shape), `size` at a time."""
        network, objective = self._network, self._network.objective
        module = network.module

        def loss_of_one(own: dict[str, Tensor], x: Any, y: Any) -> Tensor:
            called = _Called(module, own)
            losses: Tensor = objective.losses(called, tree_map(_alone, x), tree_map(_alone, y))
            return losses[0]

        of_one = vmap(grad(loss_of_one), (None, 0, 0))
        for start in range(0, self._n, size):
            part = self._batch.take(slice(start, start + size))
            found: list[Tensor] | None = None
            with self._loaded(), sdpa_kernel(SDPBackend.MATH):
                own = {name: module.get_parameter(name).detach() for name in names}
                # What `collate` makes may have its samples along any axis, or be no tensor at all.
                if not objective.collates:
                    # Not every layer can be mapped over: recurrent ones, for instance.
                    with suppress(RuntimeError, ValueError, TypeError), warnings.catch_warnings():
                        # Layers that torch maps over by a loop are right, and slow, and say so.
                        warnings.filterwarnings("ignore", "There is a performance drop")
                        x, y = objective.read(part, network.device)
                        found = list(of_one(own, x, y).values())
                if found is None:
                    found = self._one_by_one(part, names)
            yield found

    def _one_by_one(self, part: Batch, names: Sequence[str]) -> list[Tensor]:
        """Compute the gradients of `_gradients` by a pass for each sample."""
        alone = [self._of_one_alone(part.take(slice(i, i + 1)), names) for i in range(len(part))]
        return [torch.stack(own) for own in zip(*alone, strict=True)]

    def _of_one_alone(self, one: Batch, names: Sequence[str]) -> list[Tensor]:
        network = self._network
        x, y = network.objective.read(one, network.device)
        parameters = [network.module.get_parameter(name) for name in names]
        with network.differentiable(parameters):
            loss = network.objective.losses(network.module, x, y).sum()
            return list(torch.autograd.grad(loss, parameters, materialize_grads=True))


class _Called:
    """A module with other parameters in place of its own."""

    def __init__(self, module: nn.Module, own: dict[str, Tensor]) -> None:
        self._module, self._own = module, own
        self.forward = module.forward

    def __call__(self, *args: Any, **named: Any) -> Any:
        return functional_call(self._module, self._own, args, named)


def _alone(value: Any) -> Any:
    """One sample as a batch of one."""
    return value[None] if isinstance(value, Tensor) else value


def _row_products(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """<g_i, h_i> per sample, over parameters (n, *shape)."""
    products = [g.double() * h.double() for g, h in zip(mine, theirs, strict=True)]
    # A parameter may be a single number, or none at all.
    rows = [each.reshape(len(each), prod(each.shape[1:])).sum(1) for each in products]
    return torch.stack(rows).sum(0)


def _inner_products(mine: Iterator[list[Tensor]], theirs: Iterator[list[Tensor]] | None) -> Scores:
    """<grad_i, grad'_i> per sample, from the gradients of a few samples at a time.

    Without `theirs` it is the squared norms: gradients are made once then.
    """
    pairs = ((g, g) for g in mine) if theirs is None else zip(mine, theirs, strict=True)
    return torch.cat([_row_products(*pair) for pair in pairs]).cpu().numpy()
