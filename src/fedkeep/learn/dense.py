"""The arithmetic of dense ReLU networks with softmax cross-entropy, in numpy.

A leading axis of C runs through all of it: C models over C batches at once, and C = 1 for a single one.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from fedkeep.core.types import AnyArray, IntArray
from fedkeep.learn.measurements import Outer

Layers: TypeAlias = Sequence[tuple[AnyArray, AnyArray]]
"""Weight (C, out, in) and bias (C, out) of each layer."""
Forward: TypeAlias = Callable[[], tuple[list[AnyArray], AnyArray]]
"""Gives the input of each layer, (C, n, in), and the logits, (C, n, Y)."""


def paired(parameters: Sequence[AnyArray]) -> Layers:
    """Weights and biases in turn, by layer."""
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def forward(layers: Layers, x: AnyArray) -> tuple[list[AnyArray], AnyArray]:
    """The input of every layer, (C, n, in), and the logits, (C, n, Y), of samples (C, n, ...)."""
    inputs = [np.asarray(x, dtype=np.float32).reshape(*x.shape[:2], layers[0][0].shape[-1])]
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


def gradients(
    room: Sequence[AnyArray], parameters: Sequence[AnyArray], x: AnyArray, y: IntArray, share: AnyArray
) -> Sequence[AnyArray]:
    """By each parameter, (C, *shape), of the losses of C models, multiplied by `share`, (C, n), and summed, in `room`.

    To take memory anew for each step and give it back can cost as much as what is computed.
    """
    layers = paired(parameters)
    inputs, logits = forward(layers, x)
    errors = backward(layers, inputs, output_error(logits, y) * share[..., None])
    for (weight, bias), a, e in zip(paired(room), inputs, errors, strict=True):
        np.matmul(e.mT, a, out=weight)
        np.add.reduce(e, axis=1, out=bias)
    return room


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
    def valued(self) -> list[Outer]:
        inputs, _ = self._passed
        errors = backward(self._layers, inputs, self.head.e, self._first)
        return [Outer(a, e) for a, e in zip(inputs[self._first :], errors, strict=True)]

    @cached_property
    def _passed(self) -> tuple[list[AnyArray], AnyArray]:
        return self._run()
