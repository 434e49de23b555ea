"""The arithmetic of dense ReLU networks with softmax cross-entropy, in numpy.

A leading axis of C runs through all of it: C models over C batches at once, and C = 1 for a single one.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import numpy as np

from fedkeep.core.types import AnyArray, IntArray, Scores, Vector
from fedkeep.learn.flat import Layout, flatten

Layers: TypeAlias = list[tuple[AnyArray, AnyArray]]
"""Weight (C, out, in) and bias (C, out) of each layer."""


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


def losses_and_errors(logits: AnyArray, y: IntArray) -> tuple[AnyArray, AnyArray]:
    """The cross-entropy of each sample, (C, n), and its gradient by the logits, softmax(z) - onehot(y)."""
    z = (logits - logits.max(axis=-1, keepdims=True)).reshape(-1, logits.shape[-1])
    rows, labels = np.arange(len(z)), y.ravel()
    of_label = z[rows, labels]
    error = np.exp(z, out=z)
    total = error.sum(axis=-1)
    losses = np.log(total) - of_label
    error /= total[:, None]
    error[rows, labels] -= 1.0
    return losses.reshape(y.shape), error.reshape(logits.shape)


def backward(layers: Layers, inputs: list[AnyArray], error: AnyArray, first: int = 0) -> list[AnyArray]:
    """The gradient of each sample's loss by the outputs of the layers from `first` on, (C, n, out)."""
    errors = [error]
    for index in range(len(layers) - 1, first, -1):
        below = errors[0] @ layers[index][0]
        below *= inputs[index] > 0
        errors.insert(0, below)
    return errors


class Trace:
    """One forward pass of C models over C batches, and the errors of its valued layers when asked for."""

    def __init__(self, layers: Layers, x: AnyArray, y: IntArray, first: int) -> None:
        self._layers, self._first = layers, first
        self.inputs, logits = forward(layers, x)
        self.losses, self.head_error = losses_and_errors(logits, y)

    @cached_property
    def valued(self) -> list[tuple[AnyArray, AnyArray]]:
        """Input and error of each valued layer: a sample's gradient is their outer product."""
        errors = backward(self._layers, self.inputs, self.head_error, self._first)
        return list(zip(self.inputs[self._first :], errors, strict=True))


class DenseMeasurements:
    """The `n` samples of device `c` of a trace, by the closed forms of a dense layer."""

    def __init__(self, trace: Trace, c: int, n: int, valued: Layout) -> None:
        self._trace, self._c, self._n, self._layout = trace, c, n, valued

    def losses(self) -> Scores:
        return self._trace.losses[self._c, : self._n].astype(np.float64)

    def projections(self, direction: Vector) -> Scores:
        views = self._layout.views(np.asarray(direction, dtype=np.float32))
        total = np.zeros(self._n)
        for (a, e), weight, bias in zip(self._valued, views[::2], views[1::2], strict=True):
            response = a @ weight.T
            response += bias
            total += np.einsum("no,no->n", e, response)
        return total

    def norms(self) -> Scores:
        squares: Scores = sum((_square_norms(a, e) for a, e in self._valued), np.zeros(self._n))
        return np.sqrt(squares)

    def head_norms(self) -> Scores:
        error = self._trace.head_error[self._c, : self._n]
        return np.sqrt(_square_norms(self._activations, error))

    def mean_gradient(self) -> Vector:
        if self._n == 0:
            return np.zeros(self._layout.size, dtype=np.float32)
        gradient = flatten([part for a, e in self._valued for part in (e.T @ a, e.sum(axis=0))])
        gradient /= self._n
        return gradient

    def activations(self) -> AnyArray:
        return self._activations.copy()

    @cached_property
    def _valued(self) -> list[tuple[AnyArray, AnyArray]]:
        return [(a[self._c, : self._n], e[self._c, : self._n]) for a, e in self._trace.valued]

    @cached_property
    def _activations(self) -> AnyArray:
        return self._trace.inputs[-1][self._c, : self._n]


def _square_norms(a: AnyArray, e: AnyArray) -> Scores:
    """||e (a, 1)^T||^2 per sample: the outer product's norm is the product of the norms."""
    squares: Scores = (np.einsum("ni,ni->n", a, a) + 1.0) * np.einsum("no,no->n", e, e)
    return squares.astype(np.float64)
