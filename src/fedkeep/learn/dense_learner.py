"""Dense networks without torch: the base install trains and values with these.

Softmax regression is the network without a hidden layer, `DenseLearner((features, classes))`. The flat order
is torch's: weight (out, in), then bias, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.types import AnyArray, Batch, FloatArray, IntArray, LocalTraining, Vector
from fedkeep.learn.dense import DenseMeasurements, Layers, Trace, backward, forward, output_error
from fedkeep.learn.flat import Layout, flatten
from fedkeep.learn.minibatches import minibatches

STACKED_NUMBERS = 1_000_000


class DenseProbe:
    """A frozen dense network that measures samples."""

    def __init__(self, learner: DenseLearner, model: Vector) -> None:
        self._learner = learner
        self._model = np.array(model, dtype=np.float32)

    def measure(self, batch: Batch) -> DenseMeasurements:
        return self._learner.measure_many([self._model], [batch])[0]


class DenseLearner:
    """A dense network of given layer widths, inputs first; `last_layers` restricts the valued parameters."""

    def __init__(self, widths: Sequence[int], last_layers: int | None = None) -> None:
        depth = len(widths) - 1
        if depth < 1 or min(widths) < 1:
            raise ConfigError(f"widths must be two or more positive numbers, got {tuple(widths)}")
        if last_layers is not None and not 1 <= last_layers <= depth:
            raise ConfigError(f"last_layers must be between 1 and {depth}, got {last_layers}")
        self.widths = tuple(widths)
        self._first = 0 if last_layers is None else depth - last_layers
        self._layout = _layout(self.widths)
        self._valued = self._layout.since(2 * self._first)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def size(self) -> int:
        return self._layout.size

    @property
    def gradient_size(self) -> int:
        return self._valued.size

    def initial(self, seed: int) -> Vector:
        """Uniform within 1/sqrt(inputs), the custom of torch's linear layers."""
        rng = np.random.default_rng(seed)
        bounds = [fan_in**-0.5 for fan_in in self.widths[:-1] for _ in ("weight", "bias")]
        return flatten([rng.uniform(-b, b, s) for b, s in zip(bounds, self._layout.shapes, strict=True)])

    def probe(self, model: Vector) -> DenseProbe:
        return DenseProbe(self, model)

    def measure_many(self, models: Sequence[Vector], batches: Sequence[Batch]) -> list[DenseMeasurements]:
        """What each batch's own model sees in it."""
        if not self._stackable(batches):
            return [self.measure_many([m], [b])[0] for m, b in zip(models, batches, strict=True)]
        layers = self._layers(models[0][None] if len(models) == 1 else np.stack(models))
        trace = Trace(lambda: forward(layers, self._stack(batches)), _labels(batches), layers, self._first)
        return [DenseMeasurements(trace, self._valued, len(batch), c) for c, batch in enumerate(batches)]

    def train(self, model: Vector, batch: Batch, weights: FloatArray, local: LocalTraining, seed: int) -> Vector:
        return self.train_many(model, [batch], [weights], local, [seed])[0]

    def train_many(
        self,
        model: Vector,
        batches: Sequence[Batch],
        weights: Sequence[FloatArray],
        local: LocalTraining,
        seeds: Sequence[int],
    ) -> list[Vector]:
        """Where each batch leads from the same model; mini-batches are not aligned, so they go one by one."""
        if len(batches) > 1 and (local.batch_size is not None or not self._stackable(batches)):
            jobs = zip(batches, weights, seeds, strict=True)
            return [self.train_many(model, [b], [w], local, [s])[0] for b, w, s in jobs]
        x, y = self._stack(batches), _labels(batches)
        gamma = np.zeros(y.shape, dtype=np.float32)
        for c, own in enumerate(weights):
            gamma[c, : len(own)] = own
        models = np.repeat(np.asarray(model, dtype=np.float32)[None], len(batches), axis=0)
        layers = self._layers(models)
        with np.errstate(over="ignore", invalid="ignore"):
            for index in minibatches(y.shape[1], local, seeds[0]):
                pull = models - model if local.proximal else None
                _descend(layers, x[:, index], y[:, index], gamma[:, index], local.learning_rate)
                if pull is not None:
                    models -= (local.learning_rate * local.proximal) * pull
        return list(models)

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        _, logits = forward(self._layers(model[None]), self._rows(x)[None])
        scores: AnyArray = logits[0]
        return scores

    def _layers(self, models: AnyArray) -> Layers:
        views = self._layout.views(models)
        return list(zip(views[::2], views[1::2], strict=True))

    def _rows(self, x: AnyArray) -> AnyArray:
        return np.asarray(x, dtype=np.float32).reshape(len(x), self.widths[0])

    def _stackable(self, batches: Sequence[Batch]) -> bool:
        """Whether one call for all is faster: where calls cost more than copying and padding."""
        padded = len(batches) * max(map(len, batches), default=0)
        small = padded * self.widths[0] <= STACKED_NUMBERS
        return len(batches) == 1 or (small and padded <= 2 * sum(map(len, batches)))

    def _stack(self, batches: Sequence[Batch]) -> AnyArray:
        """The samples of C batches as (C, n, d), short ones padded with zeros."""
        if len(batches) == 1:
            return self._rows(batches[0].x)[None]
        x = np.zeros((len(batches), max(map(len, batches)), self.widths[0]), dtype=np.float32)
        for c, batch in enumerate(batches):
            x[c, : len(batch)] = self._rows(batch.x)
        return x


def _labels(batches: Sequence[Batch]) -> IntArray:
    """The labels of C batches as (C, n), short ones padded with zeros."""
    if len(batches) == 1:
        return batches[0].y[None]
    y = np.zeros((len(batches), max(map(len, batches))), dtype=np.int64)
    for c, batch in enumerate(batches):
        y[c, : len(batch)] = batch.y
    return y


def _descend(layers: Layers, x: AnyArray, y: IntArray, gamma: AnyArray, rate: float) -> None:
    """One step of Eq. 12 for C models, in place; where no sample weighs anything the model stays."""
    total = gamma.sum(axis=1, keepdims=True)
    share = np.divide(gamma, total, out=np.zeros_like(gamma), where=total > 0) * np.float32(rate)
    inputs, logits = forward(layers, x)
    errors = backward(layers, inputs, output_error(logits, y) * share[..., None])
    for (weight, bias), a, e in zip(layers, inputs, errors, strict=True):
        np.subtract(weight, e.swapaxes(-1, -2) @ a, out=weight)
        np.subtract(bias, e.sum(axis=1), out=bias)


def _layout(widths: Sequence[int]) -> Layout:
    names, shapes = [], []
    for index, (fan_in, fan_out) in enumerate(pairwise(widths)):
        names += [f"{index}.weight", f"{index}.bias"]
        shapes += [(fan_out, fan_in), (fan_out,)]
    return Layout(tuple(names), tuple(shapes))
