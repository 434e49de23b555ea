"""What a frozen torch model sees in a batch, from one forward and one backward pass per chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import islice
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.ports import Measurements
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Batch, Scores, Vector
from fedkeep.learn.dense import DenseTrace
from fedkeep.learn.layers import BilinearLayer, inner_products, project, summed_gradient
from fedkeep.learn.network import Network, NotedPass, as_tensor
from fedkeep.learn.traced import TracedMeasurements

ValuedLayers: TypeAlias = list[tuple[BilinearLayer, Tensor, Tensor]]
"""Each valued layer with its inputs and errors, sample by sample."""
CHUNK = 256
"""Samples per pass: enough to be efficient, few enough for the activations to be small."""
KEPT_BYTES = 1 << 28
"""How much of the passes over one batch is kept for later questions; what exceeds it is computed again."""


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
