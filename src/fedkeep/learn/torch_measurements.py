"""What a frozen torch model sees in a batch, from one forward and one backward pass per chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.types import AnyArray, Batch, Scores, Vector
from fedkeep.learn.layers import BilinearLayer, project, square_norms, summed_gradient
from fedkeep.learn.network import Network, Record, as_tensor

CHUNK = 256
"""Samples per pass: enough to be efficient, few enough for the activations to be small."""
KEPT_BYTES = 1 << 28
"""How much of the passes over one batch is kept for later questions; what exceeds it is computed again."""


class Chunks:
    """A batch in pieces of fixed size under one model, and the passes over them that are kept."""

    def __init__(self, network: Network, model: Vector, batch: Batch, size: int) -> None:
        self._network, self._model = network, model
        x, y = as_tensor(batch.x), as_tensor(batch.y)
        self.pieces = list(zip(torch.split(x, size), torch.split(y, size), strict=True)) if len(batch) else []
        self._kept: dict[int, Record] = {}
        self._room = KEPT_BYTES

    def records(self, noted: Sequence[nn.Module]) -> Iterator[Record]:
        """The passes that note at least the layers `noted`, which end with the head."""
        for index, (x, y) in enumerate(self.pieces):
            record = self._kept.get(index)
            if record is None or len(record.layers) < len(noted):
                with self._network.lock:
                    self._network.load(self._model, frozen=True)
                    record = self._network.record(x, y, noted)
                self._keep(index, record)
            yield record

    def _keep(self, index: int, record: Record) -> None:
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
        return per_sample(record.losses for record in self._inferred())

    def projections(self, direction: Vector) -> Scores:
        return per_sample(_projections(record, self._views(direction)) for record in self._recorded())

    def norms(self) -> Scores:
        return np.sqrt(per_sample(_square_norms(record) for record in self._recorded()))

    def head_norms(self) -> Scores:
        return np.sqrt(per_sample(_square_norms(record.head_only) for record in self._inferred()))

    def mean_gradient(self) -> Vector:
        total = torch.zeros(self._network.valued.size)
        for record in self._recorded():
            total += _summed_gradient(record)
        gradient: Vector = total.div_(max(1, self._n)).numpy()
        return gradient

    def activations(self) -> AnyArray:
        return join([record.layers[-1][1].flatten(1) for record in self._inferred()])

    def _inferred(self) -> Iterator[Record]:
        return self._chunks.records(self._network.valued_layers[-1:])

    def _recorded(self) -> Iterator[Record]:
        return self._chunks.records(self._network.valued_layers)

    def _views(self, direction: Vector) -> list[list[Tensor]]:
        """The direction as weight and bias of each valued layer."""
        pieces = iter(self._network.valued.views(np.array(direction, dtype=np.float32)))
        sizes = [len(list(layer.parameters(recurse=False))) for layer in self._network.valued_layers]
        return [[torch.from_numpy(next(pieces)) for _ in range(size)] for size in sizes]


def _projections(record: Record, views: list[list[Tensor]]) -> Tensor:
    total = torch.zeros(len(record.losses), dtype=torch.float64)
    for (layer, a, e), direction in zip(_valued(record), views, strict=True):
        total += project(layer, a, e, direction[0], direction[1] if len(direction) > 1 else None)
    return total


def _square_norms(record: Record) -> Tensor:
    total = torch.zeros(len(record.losses), dtype=torch.float64)
    for layer, a, e in _valued(record):
        total += square_norms(layer, a, e)
    return total


def _summed_gradient(record: Record) -> Tensor:
    parts = [part for layer, a, e in _valued(record) for part in summed_gradient(layer, a, e)]
    return torch.cat([part.reshape(-1) for part in parts])


def _valued(record: Record) -> list[tuple[BilinearLayer, Tensor, Tensor]]:
    return cast("list[tuple[BilinearLayer, Tensor, Tensor]]", record.layers)


def per_sample(parts: Iterable[Tensor]) -> Scores:
    """One float64 number per sample, from those of the chunks."""
    return join(list(parts)).astype(np.float64, copy=False)


def join(parts: list[Tensor]) -> AnyArray:
    """The rows of all parts, as an array."""
    array: AnyArray = torch.cat(parts).numpy() if parts else np.zeros(0)
    return array
