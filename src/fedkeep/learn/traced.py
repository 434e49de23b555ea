"""Measurements of C models over C batches that were seen in one pass, each device's from its part of it."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from fedkeep.core.ports import Measurements
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Scores, Vector
from fedkeep.learn.factors import Factors, Outer
from fedkeep.learn.flat import Layout


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
