"""The arithmetic of dense ReLU networks with softmax cross-entropy, in numpy.

A leading axis of C runs through all of it: C models over C batches at once, and C = 1 for a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from fedkeep.core.ports import Measurements
from fedkeep.core.slices import of_same_kind
from fedkeep.core.types import AnyArray, IntArray, Scores, Vector
from fedkeep.learn.flat import Layout

Layers: TypeAlias = Sequence[tuple[AnyArray, AnyArray]]
"""Weight (C, out, in) and bias (C, out) of each layer."""
Forward: TypeAlias = Callable[[], tuple[list[AnyArray], AnyArray]]
"""Gives the input of each layer, (C, n, in), and the logits, (C, n, Y)."""


def forward(layers: Layers, x: AnyArray) -> tuple[list[AnyArray], AnyArray]:
    """The input of every layer, (C, n, in), and the logits, (C, n, Y)."""
    inputs = [x]
    for weight, bias in layers[:-1]:
        z = inputs[-1] @ weight.swapaxes(-1, -2)
        z += bias[:, None]
        inputs.append(np.maximum(z, 0.0, out=z))
    weight, bias = layers[-1]
    logits = inputs[-1] @ weight.swapaxes(-1, -2)
    logits += bias[:, None]
    return inputs, logits


def cross_entropy(logits: AnyArray, y: IntArray) -> AnyArray:
    """The loss of each sample, -log softmax(z)_y."""
    z = _class_rows(logits)
    losses: AnyArray = np.log(np.add.reduce(np.exp(z), axis=0)) - z[y.reshape(-1), np.arange(y.size)]
    return losses.reshape(y.shape)


def output_error(logits: AnyArray, y: IntArray) -> AnyArray:
    """The gradient of each sample's loss by its logits, softmax(z) - onehot(y)."""
    z = _class_rows(logits)
    np.exp(z, out=z)
    z /= np.add.reduce(z, axis=0)
    z -= np.arange(len(z))[:, None] == y.reshape(-1)
    return np.ascontiguousarray(z.T).reshape(logits.shape)


def _class_rows(logits: AnyArray) -> AnyArray:
    """Each sample's logits less their maximum, a row per class: numpy is slow along short rows."""
    z = np.array(logits.reshape(-1, logits.shape[-1]).T, order="C")
    z -= np.maximum.reduce(z, axis=0)
    return z


def backward(layers: Layers, inputs: list[AnyArray], error: AnyArray, first: int = 0) -> list[AnyArray]:
    """The gradient of each sample's loss by the outputs of the layers from `first` on, (C, n, out)."""
    errors = [error]
    for index in range(len(layers) - 1, first, -1):
        below = errors[0] @ layers[index][0]
        below *= inputs[index] > 0
        errors.insert(0, below)
    return errors


class Trace:
    """One forward pass of C models over C batches, and one backward pass, each made when first asked for.

    Without `layers` it stands for the last layer of any network, whose inputs and logits `run` gives: that
    layer is softmax regression over its inputs, whatever comes before.
    """

    def __init__(self, run: Forward, y: IntArray, layers: Layers = (), first: int = 0) -> None:
        self._run, self._y, self._layers, self._first = run, y, layers, first

    @cached_property
    def passed(self) -> tuple[list[AnyArray], AnyArray]:
        return self._run()

    @cached_property
    def losses(self) -> AnyArray:
        return cross_entropy(self.passed[1], self._y)

    @cached_property
    def head(self) -> tuple[AnyArray, AnyArray]:
        """Input and error of the last layer."""
        inputs, logits = self.passed
        return inputs[-1], output_error(logits, self._y)

    @cached_property
    def valued(self) -> list[tuple[AnyArray, AnyArray]]:
        """Input and error of each valued layer: a sample's gradient is their outer product."""
        inputs, _ = self.passed
        errors = backward(self._layers, inputs, self.head[1], self._first)
        return list(zip(inputs[self._first :], errors, strict=True))


class DenseMeasurements:
    """The `n` samples of device `c` of a trace, by the closed forms of a dense layer."""

    def __init__(self, trace: Trace, layout: Layout, n: int, c: int = 0) -> None:
        self._trace, self._layout, self._n, self._c = trace, layout, n, c

    def losses(self) -> Scores:
        return self._own(self._trace.losses).astype(np.float64)

    def projections(self, direction: Vector) -> Scores:
        views = self._layout.views(direction)
        parts = [
            _project(a, e, weight, bias)
            for (a, e), weight, bias in zip(self._valued, views[::2], views[1::2], strict=True)
        ]
        return _float64_sum(parts)

    def inner(self, other: Measurements) -> Scores:
        theirs = of_same_kind(self, other)._valued
        return _float64_sum([_inner(one, two) for one, two in zip(self._valued, theirs, strict=True)])

    def norms(self) -> Scores:
        return np.sqrt(self.inner(self))

    def head_norms(self) -> Scores:
        a, e = self._trace.head
        head = self._own(a), self._own(e)
        return np.sqrt(_float64_sum([_inner(head, head)]))

    def mean_gradient(self) -> Vector:
        return self._combined(self._valued)

    def weighted_gradient(self, weights: Scores) -> Vector:
        column = weights.astype(np.float32)[:, None]
        return self._combined([(a, e * column) for a, e in self._valued])

    def _combined(self, valued: list[tuple[AnyArray, AnyArray]]) -> Vector:
        gradient = np.empty(self._layout.size, dtype=np.float32)
        views = self._layout.views(gradient)
        for (a, e), weight, bias in zip(valued, views[::2], views[1::2], strict=True):
            np.matmul(e.T, a, out=weight)
            np.add.reduce(e, axis=0, out=bias)
        gradient /= max(1, self._n)
        return gradient

    def activations(self) -> AnyArray:
        return self._own(self._trace.passed[0][-1]).copy()

    @cached_property
    def _valued(self) -> list[tuple[AnyArray, AnyArray]]:
        return [(self._own(a), self._own(e)) for a, e in self._trace.valued]

    def _own(self, stacked: AnyArray) -> AnyArray:
        mine: AnyArray = stacked[self._c, : self._n]
        return mine


def _project(a: AnyArray, e: AnyArray, weight: AnyArray, bias: AnyArray) -> AnyArray:
    """<e (a, 1)^T, direction> per sample, as e . (weight a + bias)."""
    response = a @ weight.T
    response += bias
    projections: AnyArray = np.vecdot(e, response)
    return projections


def _inner(one: tuple[AnyArray, AnyArray], two: tuple[AnyArray, AnyArray]) -> AnyArray:
    """<e (a, 1)^T, e' (a', 1)^T> per sample: for outer products, the product of the factors' own."""
    (a, e), (b, f) = one, two
    products: AnyArray = (np.vecdot(a, b) + 1.0) * np.vecdot(e, f)
    return products


def _float64_sum(parts: list[AnyArray]) -> Scores:
    return sum(parts[1:], parts[0].astype(np.float64))
