"""What every backend's measurements have in common: each sample's gradient in factors, layer by layer.

A sample's gradient by the weight of a layer is bilinear in the layer's input `a` and output error `e`, so that sums,
projections and inner products of gradients are had without an (n, P) matrix. Arrays are (C, n, ...) for C models over
their own n samples, or (n, ...) for one of them.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedkeep.core.ports import Measurements
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Batch, Scores, Vector

KEPT_BYTES = 1 << 28
"""How much of the passes over one batch is kept for later questions; what exceeds it is computed again."""


@dataclass(frozen=True, eq=False)
class Outer:
    """The samples' gradients by a linear layer: outer products of its errors with its inputs and, for a bias, a one.

    Gradients themselves are outer products, too: with ones for errors, and no bias.
    """

    a: Any
    e: Any
    bias: bool = True

    @property
    def size(self) -> int:
        """How many parameters the layer has; they stand side by side in a flat vector."""
        return int(self.e.shape[-1] * (self.a.shape[-1] + self.bias))

    def of(self, c: int, n: int) -> "Outer":
        """The first n samples of model c."""
        return Outer(self.a[c, :n], self.e[c, :n], self.bias)

    def inner(self, other: "Outer") -> AnyArray:
        """<grad_i, grad'_i> per sample, of the same layer: for outer products, the product of the factors' own."""
        return np.asarray((np.vecdot(self.a, other.a) + self.bias) * np.vecdot(self.e, other.e))

    def project(self, direction: Vector) -> AnyArray:
        """<grad_i, direction> per sample, as e . (weight a + bias)."""
        weight, bias = self._views(direction)
        response = self.a @ weight.T
        if self.bias:
            response += bias
        return np.asarray(np.vecdot(self.e, response))

    def add_up(self, shares: Vector, out: Vector) -> None:
        """Writes sum_i shares_i grad_i into `out`."""
        weight, bias = self._views(out)
        e = self.e * shares[:, None]
        np.matmul(e.T, self.a, out=weight)
        if self.bias:
            np.add.reduce(e, axis=0, out=bias)

    def _views(self, vector: Vector) -> tuple[AnyArray, AnyArray]:
        outputs, inputs = self.e.shape[-1], self.a.shape[-1]
        return vector[: outputs * inputs].reshape(outputs, inputs), vector[outputs * inputs :]


class BatchMeasurements(Measurements):
    """What follows from the other measurements of n samples."""

    _n: int
    nbytes = 0  # what is kept for later questions

    def norms(self) -> Scores:
        return np.sqrt(self.inner(self))

    def mean_gradient(self) -> Vector:
        return self.weighted_gradient(np.ones(self._n))


class FactoredMeasurements(BatchMeasurements):
    """Measurements of n samples from the factors of the valued layers."""

    def __init__(self, gradient_size: int, n: int) -> None:
        self._size, self._n = gradient_size, n

    @abstractmethod
    def _last(self, wanted: int | None = None) -> Sequence[Outer]:
        """At least the last `wanted` valued layers; None: all of them."""

    def projections(self, direction: Vector) -> Scores:
        return _summed(factors.project(own) for factors, own in self._with_parts_of(direction))

    def inner(self, other: Measurements) -> Scores:
        theirs = of_kind(FactoredMeasurements, other)  # type: ignore[type-abstract]
        return _summed(mine.inner(same) for mine, same in zip(self._last(), theirs._last(), strict=True))

    def head_norms(self) -> Scores:
        head = self._last(1)[-1]
        return np.sqrt(_summed([head.inner(head)]))

    def weighted_gradient(self, weights: Scores) -> Vector:
        shares = (weights / max(1, self._n)).astype(np.float32)
        gradient = np.empty(self._size, dtype=np.float32)
        for factors, own in self._with_parts_of(gradient):
            factors.add_up(shares, own)
        return gradient

    def _with_parts_of(self, vector: Vector) -> Iterator[tuple[Outer, Vector]]:
        """Every valued layer beside its part of a vector."""
        start = 0
        for factors in self._last():
            yield factors, vector[start : (start := start + factors.size)]


class Trace(Protocol):
    """One forward pass of C models, and one backward pass, each made when first asked for; short batches are padded.

    `losses` are (C, n), `activations`, the last layer's inputs, (C, n, d), and need no loss; `head` is the last layer.
    """

    losses: AnyArray
    activations: AnyArray
    head: Outer
    valued: list[Outer]


class TracedMeasurements(FactoredMeasurements):
    """The `n` samples of device `c` of a trace."""

    def __init__(self, trace: Trace, gradient_size: int, n: int, c: int = 0) -> None:
        super().__init__(gradient_size, n)
        self._trace, self._c = trace, c

    def losses(self) -> Scores:
        return self._trace.losses[self._c, : self._n].astype(np.float64)

    def activations(self) -> AnyArray:
        return self._trace.activations[self._c, : self._n].copy()

    def _last(self, wanted: int | None = None) -> Sequence[Outer]:
        layers = [self._trace.head] if wanted == 1 else self._trace.valued
        return [factors.of(self._c, self._n) for factors in layers]


class ChunkedMeasurements(BatchMeasurements):
    """A large batch in pieces of so many samples; an empty one, which many layers would refuse, in none."""

    def __init__(
        self, measure: Callable[[Batch], BatchMeasurements], batch: Batch, samples: int, gradient_size: int
    ) -> None:
        self._measure, self._batch, self._n, self._size = measure, batch, len(batch), gradient_size
        self._parts = [slice(start, start + samples) for start in range(0, len(batch), samples)]
        self._kept: dict[int, BatchMeasurements] = {}

    def losses(self) -> Scores:
        return _joined(piece.losses() for piece in self._pieces())

    def projections(self, direction: Vector) -> Scores:
        return _joined(piece.projections(direction) for piece in self._pieces())

    def inner(self, other: Measurements) -> Scores:
        theirs = of_kind(ChunkedMeasurements, other)
        if theirs is self:
            return _joined(piece.inner(piece) for piece in self._pieces())
        return _joined(mine.inner(same) for mine, same in zip(self._pieces(), theirs._pieces(), strict=True))

    def head_norms(self) -> Scores:
        return _joined(piece.head_norms() for piece in self._pieces())

    def weighted_gradient(self, weights: Scores) -> Vector:
        total = np.zeros(self._size, dtype=np.float32)
        for piece, part in zip(self._pieces(), self._parts, strict=True):
            own = weights[part]
            total += piece.weighted_gradient(own * (len(own) / self._n))
        return total

    def activations(self) -> AnyArray:
        parts = [piece.activations() for piece in self._pieces()]
        return np.concatenate(parts) if parts else np.zeros((0, 0), dtype=np.float32)

    def _pieces(self) -> Iterator[BatchMeasurements]:
        for index, part in enumerate(self._parts):
            piece = self._kept.pop(index, None) or self._measure(self._batch.take(part))
            yield piece  # before it is asked something, it holds nothing
            if piece.nbytes + sum(kept.nbytes for kept in self._kept.values()) <= KEPT_BYTES:
                self._kept[index] = piece


def _summed(parts: Iterable[AnyArray]) -> Scores:
    """The layers' parts of a number per sample, added up in float64."""
    first, *rest = parts
    return sum(rest, first.astype(np.float64))


def _joined(parts: Iterable[Scores]) -> Scores:
    return np.concatenate([np.zeros(0), *parts])
