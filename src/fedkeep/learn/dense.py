"""The arithmetic of dense ReLU networks with softmax cross-entropy, in numpy.

A leading axis of C runs through all of it: C models over C batches at once, and C = 1 for a single one.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from fedkeep.core.types import AnyArray, IntArray, LocalTraining
from fedkeep.learn.traced import Factors, Outer

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


class DenseTrace:
    """One forward pass of C models over C batches, and one backward pass, each made when first asked for.

    Without `layers` it stands for the last layer of any network, whose inputs and logits `run` gives: that
    layer is softmax regression over its inputs, whatever comes before.
    """

    def __init__(self, run: Forward, y: IntArray, layers: Layers = (), first: int = 0) -> None:
        self._run, self._y, self._layers, self._first = run, y, layers, first

    @cached_property
    def losses(self) -> AnyArray:
        return cross_entropy(self._passed[1], self._y)

    @cached_property
    def head(self) -> Outer:
        return Outer(self.activations, output_error(self._passed[1], self._y))

    @property
    def activations(self) -> AnyArray:
        return self._passed[0][-1]

    @cached_property
    def valued(self) -> list[Factors]:
        inputs, _ = self._passed
        errors = backward(self._layers, inputs, self.head.e, self._first)
        return [Outer(a, e) for a, e in zip(inputs[self._first :], errors, strict=True)]

    @cached_property
    def _passed(self) -> tuple[list[AnyArray], AnyArray]:
        return self._run()


class DenseDescent:
    """The steps of Eq. 12 for C models at once, in place: `layers` are views of `models`, (C, P)."""

    def __init__(self, models: AnyArray, layers: Layers, correction: AnyArray | None, local: LocalTraining) -> None:
        self._models, self._layers = models, layers
        self._rate, self._pull = local.learning_rate, local.learning_rate * local.proximal
        self._products = [np.empty_like(weight) for weight, _ in layers]
        self._anchor = models.copy() if local.proximal else None
        self._constant = None if correction is None else local.learning_rate * correction

    def step(self, x: AnyArray, y: IntArray, gamma: AnyArray) -> None:
        """One step on samples (C, n, d) that weigh `gamma`; where they all weigh nothing the model stays."""
        total = gamma.sum(axis=1, keepdims=True)
        if not total.any():
            return
        away = None if self._anchor is None else self._models - self._anchor
        share = np.divide(gamma, total, out=np.zeros_like(gamma), where=total > 0) * np.float32(self._rate)
        inputs, logits = forward(self._layers, x)
        errors = backward(self._layers, inputs, output_error(logits, y) * share[..., None])
        for (weight, bias), a, e, product in zip(self._layers, inputs, errors, self._products, strict=True):
            np.subtract(weight, np.matmul(e.swapaxes(-1, -2), a, out=product), out=weight)
            np.subtract(bias, e.sum(axis=1), out=bias)
        if away is not None:
            self._models -= self._pull * away
        if self._constant is not None:
            self._models[:, -self._constant.shape[1] :] -= self._constant
