"""What a torch model sees in a batch: by closed forms where they hold, else by autograd alone."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedkeep.core.ports import Measurements
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Batch, Scores, Vector
from fedkeep.learn.chain import Chain, Pass
from fedkeep.learn.jobs import padded
from fedkeep.learn.layers import Placed, as_tensor, inner_products, losses, output_error
from fedkeep.learn.measurements import BatchMeasurements, Explicit, FactoredMeasurements, Outer
from fedkeep.learn.network import Network

_BLOCK = 1 << 22
"""Numbers of per-sample gradients held at a time."""


class TorchMeasurements(FactoredMeasurements):
    """The closed forms of linear and convolutional layers, from what they see in a pass of the module itself."""

    def __init__(self, network: Network, model: Vector, batch: Batch) -> None:
        super().__init__(network.valued.size, len(batch))
        self._network, self._model, self._batch = network, model, batch
        self._noted: tuple[Tensor, list[Outer | Placed]] | None = None

    def losses(self) -> Scores:
        logits, _ = self._pass(1)
        return _scores(losses(logits, as_tensor(self._batch.y)))

    def activations(self) -> AnyArray:
        inputs: AnyArray = torch.as_tensor(self._head.a).flatten(1).numpy()
        return inputs

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return 0 if self._noted is None else sum(factors.a.nbytes + factors.e.nbytes for factors in self._noted[1])

    @property
    def _head(self) -> Outer | Placed:
        return self._pass(1)[1][-1]

    @property
    def _valued(self) -> Sequence[Outer | Placed]:
        return self._pass(len(self._network.valued_layers))[1]

    def _pass(self, wanted: int) -> tuple[Tensor, list[Outer | Placed]]:
        """The logits and at least the last `wanted` valued layers: without a backward pass where one is enough."""
        if self._noted is None or len(self._noted[1]) < wanted:
            with self._network.loaded(self._model):
                x, y = as_tensor(self._batch.x), as_tensor(self._batch.y)
                self._noted = self._network.record(x, y, self._network.valued_layers[-wanted:])
        return self._noted


class ChainTrace:
    """Of a chain of layers: C models, each over its own few samples, in one pass."""

    def __init__(self, network: Network, models: Sequence[Vector], batches: Sequence[Batch]) -> None:
        self._network, self._models, self._batches = network, models, batches
        self._chain = cast("Chain", network.chain)

    @cached_property
    def losses(self) -> AnyArray:
        found: AnyArray = losses(self._passed.logits, self._y).numpy()
        return found

    @cached_property
    def head(self) -> Outer:
        return Outer(self.activations, self._error.mT.numpy())

    @property
    def activations(self) -> AnyArray:
        inputs: AnyArray = self._passed.kept[-1][-1].mT.numpy()
        return inputs

    @cached_property
    def valued(self) -> list[Outer | Explicit]:
        wanted = len(self._network.valued_layers)
        links = islice(self._chain.errors(self._parameters, self._passed, self._error), wanted)
        factors = [link.factors(kept, error) for link, kept, error in links][::-1]
        del self._passed.kept[:-1]  # the activations of all layers are much larger than what is made of them
        return factors

    @cached_property
    def _y(self) -> Tensor:
        return as_tensor(padded([batch.y for batch in self._batches]))

    @cached_property
    def _parameters(self) -> list[Tensor]:
        first = self._models[0]
        shared = all(model is first for model in self._models)
        models = as_tensor(first).expand(len(self._models), -1) if shared else as_tensor(np.stack(self._models))
        return self._network.layout.views(models)

    @cached_property
    def _passed(self) -> Pass:
        return self._chain.forward(self._parameters, as_tensor(padded([batch.x for batch in self._batches])))

    @cached_property
    def _error(self) -> Tensor:
        return output_error(self._passed.logits, self._y)


class AutogradMeasurements(BatchMeasurements):
    """The same quantities by autograd alone: slower, and right for all that autograd differentiates twice."""

    def __init__(self, network: Network, model: Vector, batch: Batch) -> None:
        self._network, self._model, self._n = network, model, len(batch)
        self._x, self._y = as_tensor(batch.x), as_tensor(batch.y)

    def losses(self) -> Scores:
        with self._network.loaded(self._model):
            return _scores(self._losses())

    def projections(self, direction: Vector) -> Scores:
        """<grad_i, direction>, as the derivative of <sum_i v_i grad_i, direction> by v."""
        tangents = self._network.valued.views(as_tensor(direction))
        with self._network.loaded(self._model), _plain_attention():
            with self._network.differentiable():
                found = self._losses()
                v = torch.ones_like(found, requires_grad=True)
                parameters = self._network.valued_parameters
                mixed = torch.autograd.grad(found, parameters, v, create_graph=True, materialize_grads=True)
            used = [(part, tangent) for part, tangent in zip(mixed, tangents, strict=True) if part.requires_grad]
            parts, along = zip(*used, strict=True)
            return _scores(torch.autograd.grad(parts, v, along)[0])

    def inner(self, other: Measurements) -> Scores:
        return self._inner(of_kind(AutogradMeasurements, other), self._network.valued.names)

    def head_norms(self) -> Scores:
        own = len(list(self._network.head.parameters(recurse=False)))
        return np.sqrt(self._inner(self, self._network.valued.names[-own:]))

    def weighted_gradient(self, weights: Scores) -> Vector:
        shares = as_tensor(weights / max(1, self._n))
        with self._network.loaded(self._model), self._network.differentiable():
            loss = self._losses() @ shares
            parts = torch.autograd.grad(loss, self._network.valued_parameters, materialize_grads=True)
        gradient: Vector = torch.cat([part.reshape(-1) for part in parts]).numpy()
        return gradient

    def activations(self) -> AnyArray:
        with self._network.loaded(self._model), torch.no_grad():  # or no output could be changed in place
            _, [calls] = self._network.observe(self._x, [self._network.head])
        inputs: AnyArray = calls[-1][0].flatten(1).numpy()
        return inputs

    def _losses(self) -> Tensor:
        return losses(self._network.module(self._x), self._y)

    def _inner(self, other: "AutogradMeasurements", names: Sequence[str]) -> Scores:
        """<grad_i, grad'_i> over the parameters `names`, from the gradients of a few samples at a time."""
        width = sum(self._network.module.get_parameter(name).numel() for name in names)
        size = max(1, _BLOCK // (2 * width))
        theirs = None if other is self else other._gradients(size, names)
        return inner_products(self._gradients(size, names), theirs)

    def _gradients(self, size: int, names: Sequence[str]) -> Iterator[list[Tensor]]:
        """The gradient of every sample by each parameter of `names`, (n, *shape), `size` samples at a time."""
        for x, y in zip(torch.split(self._x, size), torch.split(self._y, size), strict=True):
            with self._network.loaded(self._model), _plain_attention():
                found = self._gradients_of(x, y, names)
            yield found

    def _gradients_of(self, x: Tensor, y: Tensor, names: Sequence[str]) -> list[Tensor]:
        parameters = {name: self._network.module.get_parameter(name).detach() for name in names}
        per_sample = grad(self._single_loss)
        try:
            return list(vmap(per_sample, (None, 0, 0))(parameters, x, y).values())
        except RuntimeError:  # not every layer can be mapped over (recurrent ones, for instance)
            singles = [per_sample(parameters, *pair) for pair in zip(x, y, strict=True)]
            return [torch.stack([single[name] for single in singles]) for name in names]

    def _single_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return losses(functional_call(self._network.module, parameters, (x[None],)), y[None])[0]


def _scores(found: Tensor) -> Scores:
    return found.detach().numpy().astype(np.float64)


def _plain_attention() -> AbstractContextManager[None]:
    """Without the fused attention kernels, which can be neither differentiated twice nor mapped over."""
    return sdpa_kernel(SDPBackend.MATH)
