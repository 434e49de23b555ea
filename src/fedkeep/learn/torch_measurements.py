"""What a frozen torch model sees in a batch: by closed forms where they hold, else by autograd alone."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, reduce
from itertools import islice
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from fedkeep.core.ports import Measurements
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Batch, Scores, Vector
from fedkeep.learn.chain import Chain, Pass
from fedkeep.learn.dense import DenseTrace
from fedkeep.learn.layers import BilinearLayer, inner_products, project, summed_gradient
from fedkeep.learn.network import CHUNK, Network, NotedPass, as_tensor, losses, output_error
from fedkeep.learn.traced import Factors, Outer, TracedMeasurements

ValuedLayers: TypeAlias = list[tuple[BilinearLayer, Tensor, Tensor]]
"""Each valued layer with its inputs and errors, sample by sample."""
KEPT_BYTES = 1 << 28
"""How much of the passes over one batch is kept for later questions; what exceeds it is computed again."""
_BLOCK = 1 << 22
"""Numbers of per-sample gradients held at a time."""


class Chunks:
    """A batch in pieces of fixed size under one model, and the passes over them that are kept."""

    def __init__(self, network: Network, model: Vector, batch: Batch, size: int) -> None:
        self._network, self._model = network, model
        self.pieces = list(zip(pieces(as_tensor(batch.x), size), pieces(as_tensor(batch.y), size), strict=True))
        self._kept: dict[int, NotedPass] = {}
        self._room = KEPT_BYTES

    def records(self, noted: Sequence[nn.Module]) -> Iterator[NotedPass]:
        """The passes that note at least the layers `noted`, which end with the head."""
        for index, (x, y) in enumerate(self.pieces):
            record = self._kept.get(index)
            if record is None or len(record.layers) < len(noted):
                with self._network.lock:
                    self._network.load(self._model, frozen=True)
                    record = self._network.record(x, y, noted)
                self._keep(index, record)
            yield record

    def _keep(self, index: int, record: NotedPass) -> None:
        if record.nbytes > self._room:
            record = record.head_only
        self._room -= record.nbytes
        self._kept[index] = record


class TorchMeasurements:
    """The closed forms of linear and convolutional layers, summed over the valued layers."""

    def __init__(self, network: Network, model: Vector, batch: Batch, chunk: int = CHUNK) -> None:
        self._network, self._n = network, len(batch)
        self._chunks = Chunks(network, model, batch, chunk)

    def losses(self) -> Scores:
        return per_sample(record.losses() for record in self._inferred())

    def projections(self, direction: Vector) -> Scores:
        views = self._views(direction)
        return per_sample(_projections(record, views) for record in self._recorded())

    def inner(self, other: Measurements) -> Scores:
        theirs = of_kind(TorchMeasurements, other)
        if theirs is self:
            return per_sample(_inner_products(record, record) for record in self._recorded())
        pairs = zip(self._recorded(), theirs._recorded(), strict=True)
        return per_sample(_inner_products(*pair) for pair in pairs)

    def norms(self) -> Scores:
        return np.sqrt(self.inner(self))

    def head_norms(self) -> Scores:
        heads = (record.head_only for record in self._inferred())
        return np.sqrt(per_sample(_inner_products(head, head) for head in heads))

    def mean_gradient(self) -> Vector:
        return self._combined(_valued(record) for record in self._recorded())

    def weighted_gradient(self, weights: Scores) -> Vector:
        return self._combined(self._weighed(torch.from_numpy(weights.astype(np.float32))))

    def _combined(self, chunks: Iterable[ValuedLayers]) -> Vector:
        gradient: Vector = _sum(_summed_gradient(valued) for valued in chunks).div_(self._n).numpy()
        return gradient

    def _weighed(self, weights: Tensor) -> Iterator[ValuedLayers]:
        """Each chunk's layers, with the error of every sample multiplied by its weight."""
        done = 0
        for valued in map(_valued, self._recorded()):
            own = weights[done : done + len(valued[-1][-1])]
            done += len(own)
            yield [(layer, a, e * own.view(-1, *[1] * (e.dim() - 1))) for layer, a, e in valued]

    def activations(self) -> AnyArray:
        return join([record.layers[-1][1].flatten(1) for record in self._inferred()])

    def _inferred(self) -> Iterator[NotedPass]:
        return self._chunks.records(self._network.valued_layers[-1:])

    def _recorded(self) -> Iterator[NotedPass]:
        return self._chunks.records(self._network.valued_layers)

    def _views(self, direction: Vector) -> list[list[Tensor]]:
        """The direction as weight and, where there is one, bias of each valued layer."""
        views = map(as_tensor, self._network.valued.views(direction))
        return [list(islice(views, count)) for count in self._network.valued_counts]


class HeadMeasurements(TracedMeasurements):
    """Of a linear last layer with a bias that gives the logits: inference, then softmax regression on its inputs."""

    def __init__(self, network: Network, model: Vector, batch: Batch, chunk: int) -> None:
        def infer() -> tuple[list[AnyArray], AnyArray]:
            inputs, logits = [], []
            for x in pieces(as_tensor(batch.x), chunk):
                with network.lock:
                    network.load(model, frozen=True)
                    output, [[(activations, _)]] = network.observe(x, [network.head])
                inputs.append(activations)
                logits.append(output)
            return [join(inputs)[None]], join(logits)[None]

        super().__init__(DenseTrace(infer, batch.y[None]), network.valued, len(batch))


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
    def valued(self) -> list[Factors]:
        wanted = len(self._network.valued_layers)
        links = islice(self._chain.errors(self._parameters, self._passed, self._error), wanted)
        factors = [link.factors(kept, error) for link, kept, error in links][::-1]
        del self._passed.kept[:-1]  # the activations of all layers are much larger than what is made of them
        return factors

    @cached_property
    def _y(self) -> Tensor:
        return pad_sequence([as_tensor(batch.y) for batch in self._batches], batch_first=True)

    @cached_property
    def _parameters(self) -> list[Tensor]:
        first = self._models[0]
        if all(model is first for model in self._models):
            return self._network.stacked(as_tensor(first).expand(len(self._models), -1))
        return self._network.stacked(torch.from_numpy(np.stack(self._models)))

    @cached_property
    def _passed(self) -> Pass:
        x = pad_sequence([as_tensor(batch.x) for batch in self._batches], batch_first=True)
        return self._chain.forward(self._parameters, x)

    @cached_property
    def _error(self) -> Tensor:
        return output_error(self._passed.logits, self._y)


class AutogradMeasurements:
    """The same quantities by autograd alone: slower, and right for all that autograd differentiates twice."""

    def __init__(self, network: Network, model: Vector, batch: Batch, chunk: int = CHUNK) -> None:
        self._network, self._model, self._n, self._chunk = network, model, len(batch), chunk
        self._x, self._y = as_tensor(batch.x), as_tensor(batch.y)

    def losses(self) -> Scores:
        return per_sample([self._losses(x, y) for x, y in self._pieces(self._chunk)])

    def projections(self, direction: Vector) -> Scores:
        views = self._network.valued.views(np.array(direction, dtype=np.float32))
        tangents = [torch.from_numpy(view) for view in views]
        with _plain_attention():
            return per_sample([self._project(x, y, tangents) for x, y in self._pieces(self._chunk)])

    def inner(self, other: Measurements) -> Scores:
        return self._inner(of_kind(AutogradMeasurements, other), self._network.valued.names)

    def norms(self) -> Scores:
        return np.sqrt(self.inner(self))

    def head_norms(self) -> Scores:
        own = len(list(self._network.head.parameters(recurse=False)))
        return np.sqrt(self._inner(self, self._network.valued.names[-own:]))

    def mean_gradient(self) -> Vector:
        return self.weighted_gradient(np.ones(self._n))

    def weighted_gradient(self, weights: Scores) -> Vector:
        total = torch.zeros(self._network.valued.size)
        shares = torch.split(torch.from_numpy(weights.astype(np.float32)), self._chunk)
        for (x, y), share in zip(self._pieces(self._chunk), shares, strict=False):
            with self._network.differentiable():
                total_loss = self._losses(x, y) @ share
                parts = torch.autograd.grad(total_loss, self._network.valued_parameters, materialize_grads=True)
            total += torch.cat([part.reshape(-1) for part in parts])
        gradient: Vector = total.div_(self._n).numpy()
        return gradient

    def activations(self) -> AnyArray:
        parts = []
        for x, _ in self._pieces(self._chunk):
            _, [calls] = self._network.observe(x, [self._network.head])
            parts.append(calls[-1][0].flatten(1))
        return join(parts)

    def _losses(self, x: Tensor, y: Tensor) -> Tensor:
        return losses(self._network.module(x), y)

    def _project(self, x: Tensor, y: Tensor, tangents: list[Tensor]) -> Tensor:
        """<grad_i, tangents>, as the derivative of <sum_i v_i grad_i, tangents> by v."""
        with self._network.differentiable():
            found = self._losses(x, y)
            v = torch.ones_like(found, requires_grad=True)
            parameters = self._network.valued_parameters
            mixed = torch.autograd.grad(found, parameters, v, create_graph=True, materialize_grads=True)
        used = [(part, tangent) for part, tangent in zip(mixed, tangents, strict=True) if part.requires_grad]
        parts, along = zip(*used, strict=True)
        return torch.autograd.grad(parts, v, along)[0]

    def _inner(self, other: "AutogradMeasurements", names: Sequence[str]) -> Scores:
        """<grad_i, grad'_i> over the parameters `names`, from the gradients of a few samples at a time."""
        width = sum(p.numel() for name, p in self._network.module.named_parameters() if name in names)
        size = min(self._chunk, max(1, _BLOCK // (width if other is self else 2 * width)))
        with _plain_attention():
            mine = self._gradients(size, names)
            pairs = ((g, g) for g in mine) if other is self else zip(mine, other._gradients(size, names), strict=True)
            return per_sample([_products(*pair) for pair in pairs])

    def _gradients(self, size: int, names: Sequence[str]) -> Iterator[list[Tensor]]:
        """The gradient of every sample by each parameter of `names`, (n, *shape), `size` samples at a time."""
        for x, y in self._pieces(size):
            yield self._gradients_of(x, y, names)

    def _gradients_of(self, x: Tensor, y: Tensor, names: Sequence[str]) -> list[Tensor]:
        parameters = {name: self._network.module.get_parameter(name).detach() for name in names}
        per_sample_gradient = grad(self._single_loss)
        try:
            return list(vmap(per_sample_gradient, (None, 0, 0))(parameters, x, y).values())
        except RuntimeError:  # not every layer can be mapped over (recurrent ones, for instance)
            singles = [per_sample_gradient(parameters, *pair) for pair in zip(x, y, strict=True)]
            return [torch.stack([single[name] for single in singles]) for name in names]

    def _single_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return losses(functional_call(self._network.module, parameters, (x[None],)), y[None])[0]

    def _pieces(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of each chunk, while the model is loaded."""
        for x, y in zip(pieces(self._x, size), pieces(self._y, size), strict=True):
            with self._network.lock:
                self._network.load(self._model, frozen=True)
                yield x, y


def _projections(record: NotedPass, views: list[list[Tensor]]) -> Tensor:
    layers = zip(_valued(record), views, strict=True)
    return _sum(project(layer, a, e, *direction) for (layer, a, e), direction in layers)


def _inner_products(one: NotedPass, two: NotedPass) -> Tensor:
    layers = zip(_valued(one), _valued(two), strict=True)
    return _sum(inner_products(layer, (a, e), (b, f)) for (layer, a, e), (_, b, f) in layers)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return reduce(torch.Tensor.add_, terms)


def _summed_gradient(valued: ValuedLayers) -> Tensor:
    parts = [part for layer, a, e in valued for part in summed_gradient(layer, a, e)]
    return torch.cat([part.reshape(-1) for part in parts])


def _valued(record: NotedPass) -> ValuedLayers:
    return cast("ValuedLayers", record.layers)


def pieces(rows: Tensor, size: int) -> Sequence[Tensor]:
    """The rows, `size` at a time."""
    return torch.split(rows, size) if len(rows) > size else [rows]


def per_sample(parts: Iterable[Tensor]) -> Scores:
    """One float64 number per sample, from those of the chunks."""
    return join(list(parts)).astype(np.float64)


def join(parts: list[Tensor]) -> AnyArray:
    """The rows of all parts, as an array."""
    array: AnyArray = (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy()
    return array


def _products(mine: list[Tensor], other: list[Tensor]) -> Tensor:
    parts = [(g.double() * h.double()).flatten(1).sum(1) for g, h in zip(mine, other, strict=True)]
    return torch.stack(parts).sum(0)


def _plain_attention() -> AbstractContextManager[None]:
    """Without the fused attention kernels, which can be neither differentiated twice nor mapped over."""
    return sdpa_kernel(SDPBackend.MATH)
