"""What C models see in C batches in one pass: each sample's gradient by layers, and each device's part of it.

Gradients are in the form that is least to keep and to multiply. Arrays are (C, n, ...) for C models over their own n
samples, or (n, ...) for one of them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import numpy as np

from fedkeep.core.ports import Measurements
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Scores, Vector
from fedkeep.learn.flat import Layout


class Factors(Protocol):
    """The samples' gradients by the weight and the bias of a layer."""

    def of(self, c: int, n: int) -> Self:
        """Those of the first n samples of model c."""

    def inner(self, other: Self) -> AnyArray:
        """<grad_i, grad'_i> per sample."""

    def project(self, weight: AnyArray, bias: AnyArray) -> AnyArray:
        """<grad_i, (weight, bias)> per sample."""

    def add_up(self, shares: AnyArray, weight: AnyArray, bias: AnyArray) -> None:
        """Writes sum_i shares_i grad_i into `weight` and `bias`."""


@dataclass(frozen=True, eq=False)
class Outer:
    """A linear layer: the outer products of its errors with its inputs and a one, e (a, 1)^T."""

    a: AnyArray
    e: AnyArray

    def of(self, c: int, n: int) -> "Outer":
        return Outer(self.a[c, :n], self.e[c, :n])

    def inner(self, other: "Outer") -> AnyArray:
        """For outer products, the product of the factors' own."""
        products: AnyArray = (np.vecdot(self.a, other.a) + 1.0) * np.vecdot(self.e, other.e)
        return products

    def project(self, weight: AnyArray, bias: AnyArray) -> AnyArray:
        """As e . (weight a + bias)."""
        response = self.a @ weight.T
        response += bias
        projections: AnyArray = np.vecdot(self.e, response)
        return projections

    def add_up(self, shares: AnyArray, weight: AnyArray, bias: AnyArray) -> None:
        e = self.e * shares[:, None]
        np.matmul(e.T, self.a, out=weight)
        np.add.reduce(e, axis=0, out=bias)


@dataclass(frozen=True, eq=False)
class Explicit:
    """A convolution: the gradients themselves, as (n, numbers of the weight) and (n, out)."""

    weight: AnyArray
    bias: AnyArray

    def of(self, c: int, n: int) -> "Explicit":
        return Explicit(self.weight[c, :n], self.bias[c, :n])

    def inner(self, other: "Explicit") -> AnyArray:
        products: AnyArray = np.vecdot(self.weight, other.weight) + np.vecdot(self.bias, other.bias)
        return products

    def project(self, weight: AnyArray, bias: AnyArray) -> AnyArray:
        projections: AnyArray = self.weight @ weight.reshape(-1) + self.bias @ bias
        return projections

    def add_up(self, shares: AnyArray, weight: AnyArray, bias: AnyArray) -> None:
        np.matmul(shares, self.weight, out=weight.reshape(-1))
        np.matmul(shares, self.bias, out=bias)


class Trace(Protocol):
    """One forward pass, and one backward pass, each made when first asked for; short batches are padded."""

    @property
    def losses(self) -> AnyArray:
        """(C, n)."""

    @property
    def head(self) -> Outer:
        """The last layer's inputs and errors."""

    @property
    def activations(self) -> AnyArray:
        """The last layer's inputs, for which no loss is needed, (C, n, d)."""

    @property
    def valued(self) -> list[Factors]:
        """Every valued layer."""


class TracedMeasurements:
    """The `n` samples of device `c` of a trace; `layout` is that of the valued parameters."""

    def __init__(self, trace: Trace, layout: Layout, n: int, c: int = 0) -> None:
        self._trace, self._layout, self._n, self._c = trace, layout, n, c

    def losses(self) -> Scores:
        return self._trace.losses[self._c, : self._n].astype(np.float64)

    def projections(self, direction: Vector) -> Scores:
        views = self._layout.views(direction)
        layers = zip(self._valued, views[::2], views[1::2], strict=True)
        return _float64_sum([factors.project(weight, bias) for factors, weight, bias in layers])

    def inner(self, other: Measurements) -> Scores:
        layers = zip(self._valued, of_kind(TracedMeasurements, other)._valued, strict=True)
        return _float64_sum([mine.inner(theirs) for mine, theirs in layers])

    def norms(self) -> Scores:
        return np.sqrt(self.inner(self))

    def head_norms(self) -> Scores:
        head = self._trace.head.of(self._c, self._n)
        return np.sqrt(_float64_sum([head.inner(head)]))

    def mean_gradient(self) -> Vector:
        return self.weighted_gradient(np.ones(self._n))

    def weighted_gradient(self, weights: Scores) -> Vector:
        shares = (weights / max(1, self._n)).astype(np.float32)
        gradient = np.empty(self._layout.size, dtype=np.float32)
        views = self._layout.views(gradient)
        for factors, weight, bias in zip(self._valued, views[::2], views[1::2], strict=True):
            factors.add_up(shares, weight, bias)
        return gradient

    def activations(self) -> AnyArray:
        return self._trace.activations[self._c, : self._n].copy()

    @cached_property
    def _valued(self) -> list[Factors]:
        return [factors.of(self._c, self._n) for factors in self._trace.valued]


def _float64_sum(parts: list[AnyArray]) -> Scores:
    return sum(parts[1:], parts[0].astype(np.float64))
