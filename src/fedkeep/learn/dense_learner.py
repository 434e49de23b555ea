"""Dense ReLU networks in numpy, for installations without torch.

Softmax regression is the network without a hidden layer, `DenseLearner((features, classes))`, and
linear regression `DenseLearner((features, 1), loss=NumberLoss())`. The
flat order is torch's: weight (out, in), then bias, layer by layer. In the arithmetic a leading axis
of C runs through everything: C models over C batches at once, and C = 1 for a single one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import pairwise
from math import prod
from typing import TypeAlias

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import TrainingJob
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Vector
from fedkeep.learn.backends import (
    FrozenModel,
    LayerFactors,
    Layout,
    TracedMeasurements,
    local_sgd,
    padded,
    require_layers,
)
from fedkeep.learn.losses import CROSS_ENTROPY, Loss

Layers: TypeAlias = Sequence[tuple[AnyArray, AnyArray]]
"""Weight (C, out, in) and bias (C, out) of each layer."""
_STACKED_NUMBERS = 1_000_000
_CACHED_NUMBERS = 1 << 17
"""Parameters of models trained side by side: more do not stay in the cache from step to step."""


class DenseLearner:
    """A dense network of given layer widths, inputs first.

    `last_layers` restricts the valued parameters; the loss is the cross-entropy unless another is
    given, and then the outputs are no class scores.

    >>> learner = DenseLearner((2, 3))  # softmax regression
    >>> model = np.zeros(learner.size, dtype=np.float32)
    >>> batch = Batch(np.array([[1.0, 0.0]]), np.array([2]), np.array([0]))
    >>> seen = learner.probe(model).measure(batch)
    >>> seen.losses().round(3).tolist()  # log 3
    [1.099]
    >>> job = TrainingJob(batch, weights=np.ones(1), seed=0)
    >>> trained = learner.train(model, job, LocalTraining(0.5, epochs=10))
    >>> bool(learner.probe(trained).measure(batch).losses()[0] < 0.2)
    True
    """

    def __init__(
        self, widths: Sequence[int], last_layers: int | None = None, loss: Loss = CROSS_ENTROPY
    ) -> None:
        depth = len(widths) - 1
        if depth < 1 or min(widths) < 1:
            raise ConfigError(f"widths must be two or more positive numbers, got {tuple(widths)}")
        self.widths, self.loss = tuple(widths), loss
        self._first = depth - require_layers(last_layers, depth)
        shapes = [
            shape
            for fan_in, fan_out in pairwise(self.widths)
            for shape in ((fan_out, fan_in), (fan_out,))
        ]
        self.layout = Layout((), tuple(shapes))
        self.size, self.gradient_size = self.layout.size, self.layout.since(2 * self._first).size

    def tail(self, layers: int | None) -> int:
        """Count the parameters of the last `layers` valued layers; None: of all that are valued."""
        return sum(map(prod, self.gradient_shapes(layers)))

    def gradient_shapes(self, layers: int | None) -> tuple[tuple[int, ...], ...]:
        """Give the shapes of these parameters, in the order in which they are flattened."""
        valued = len(self.widths) - 1 - self._first
        return self.layout.since(-2 * require_layers(layers, valued)).shapes

    def initial(self, seed: int) -> Vector:
        """Uniform within 1/sqrt(inputs), the custom of torch's linear layers."""
        rng = np.random.default_rng(seed)
        bounds = [fan_in**-0.5 for fan_in in self.widths[:-1] for _ in ("weight", "bias")]
        parts = [
            rng.uniform(-b, b, prod(s)) for b, s in zip(bounds, self.layout.shapes, strict=True)
        ]
        return np.concatenate(parts).astype(np.float32)

    def probe(self, model: Vector) -> FrozenModel:
        """Freeze a model to measure samples with."""
        return FrozenModel(self, model)

    def measure_many(
        self, models: Sequence[Vector], batches: Sequence[Batch]
    ) -> list[TracedMeasurements]:
        """Measure each batch under its own model."""
        if not self._stackable(batches):
            return [self.measure_many([m], [b])[0] for m, b in zip(models, batches, strict=True)]
        shared = all(model is models[0] for model in models)
        layers = paired(self.layout.views(models[0][None] if shared else np.stack(models)))
        y = padded([self.loss.targets(batch.y, self.widths[-1]) for batch in batches])
        trace = DenseTrace(
            lambda: forward(layers, padded([batch.x for batch in batches])),
            y,
            layers,
            self._first,
            self.loss,
        )
        return [TracedMeasurements(trace, len(batch), c) for c, batch in enumerate(batches)]

    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        """Train by weighted local SGD (Eq. 12)."""
        return self.train_many(model, [job], local)[0]

    def train_many(
        self, model: Vector, jobs: Sequence[TrainingJob], local: LocalTraining
    ) -> list[Vector]:
        """Train each job from the same model; mini-batches are not aligned: one by one."""
        aligned = local.batch_size is None and self._stackable([job.batch for job in jobs])
        together = max(1, _CACHED_NUMBERS // self.size) if aligned else 1
        trained: list[Vector] = []
        jobs = with_targets(jobs, self.loss, self.widths[-1])
        for start in range(0, len(jobs), together):
            group = jobs[start : start + together]
            models = np.repeat(np.asarray(model, dtype=np.float32)[None], len(group), axis=0)
            room = [np.empty_like(parameter) for parameter in self.layout.views(models)]
            into_room = partial(gradients, self.loss, room)
            with np.errstate(over="ignore", invalid="ignore"):
                local_sgd(
                    self.layout, self.gradient_size, np.asarray, models, group, local, into_room
                )
            trained += list(models)
        return trained

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        """Compute class scores, (n, classes), or what stands for the numbers to predict."""
        return np.asarray(forward(paired(self.layout.views(model[None])), x[None])[1][0])

    def _stackable(self, batches: Sequence[Batch]) -> bool:
        """Whether one call for all is faster: where calls cost more than copying and padding."""
        padded = len(batches) * max(map(len, batches), default=0)
        small = 0 < padded * self.widths[0] <= _STACKED_NUMBERS
        return len(batches) == 1 or (small and padded <= 2 * sum(map(len, batches)))


class DenseTrace:
    """One forward and one backward pass of C models over C batches, made when first asked for.

    `run` gives the input of each layer, (C, n, in), and the logits, (C, n, Y). Without `layers` it
    stands for the last layer of any network: a regression over its inputs.
    """

    def __init__(
        self,
        run: Callable[[], tuple[list[AnyArray], AnyArray]],
        y: AnyArray,
        layers: Layers = (),
        first: int = 0,
        loss: Loss = CROSS_ENTROPY,
    ) -> None:
        self._run, self._y, self._layers, self._first = cache(run), y, layers, first
        self._loss = loss

    @cached_property
    def losses(self) -> AnyArray:
        """Compute the loss of each sample."""
        return self._loss.losses(self._run()[1], self._y)

    @cached_property
    def activations(self) -> AnyArray:
        """Give the inputs of the last layer, (n, d)."""
        return self._run()[0][-1]

    @cached_property
    def head(self) -> LayerFactors:
        """Factors of the last layer."""
        return LayerFactors(self.activations, self._loss.errors(self._run()[1], self._y))

    @cached_property
    def valued(self) -> list[LayerFactors]:
        """Factors of the valued layers."""
        inputs, _ = self._run()
        errors = backward(self._layers, inputs, self.head.e, self._first)
        return [LayerFactors(a, e) for a, e in zip(inputs[self._first :], errors, strict=True)]


def with_targets(jobs: Sequence[TrainingJob], loss: Loss, outputs: int) -> Sequence[TrainingJob]:
    """Give jobs whose targets are as a loss takes them."""
    if loss is CROSS_ENTROPY:
        return jobs
    batches = [
        Batch(own.x, loss.targets(own.y, outputs), own.ids) for own in (job.batch for job in jobs)
    ]
    return [replace(job, batch=batch) for job, batch in zip(jobs, batches, strict=True)]


def paired(parameters: Sequence[AnyArray]) -> Layers:
    """Weights and biases in turn, by layer."""
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def forward(layers: Layers, x: AnyArray) -> tuple[list[AnyArray], AnyArray]:
    """Compute the input of every layer, (C, n, in), and the logits, (C, n, Y)."""
    inputs = [np.asarray(x, dtype=np.float32).reshape(*x.shape[:2], layers[0][0].shape[-1])]
    for weight, bias in layers:
        z = inputs[-1] @ weight.mT
        z += bias[:, None]
        if len(inputs) < len(layers):
            inputs.append(np.maximum(z, 0.0, out=z))
    return inputs, z


def backward(
    layers: Layers, inputs: list[AnyArray], error: AnyArray, first: int = 0
) -> list[AnyArray]:
    """Compute each loss's gradient by the outputs of the layers from `first` on, (C, n, out)."""
    errors = [error]
    for index in range(len(layers) - 1, first, -1):
        below = errors[0] @ layers[index][0]
        below *= inputs[index] > 0
        errors.insert(0, below)
    return errors


def gradients(
    loss: Loss,
    out: Sequence[AnyArray],
    parameters: Sequence[AnyArray],
    x: AnyArray,
    y: AnyArray,
    share: AnyArray,
) -> Sequence[AnyArray]:
    """Compute the gradients by each parameter, (C, *shape), of C models' weighted losses.

    The losses are multiplied by `share`, (C, n), and summed. All is written into `out`: to take
    memory anew for each step can cost as much as what is computed.
    """
    layers = paired(parameters)
    inputs, logits = forward(layers, x)
    errors = backward(layers, inputs, loss.errors(logits, y) * share[..., None])
    for (weight, bias), a, e in zip(paired(out), inputs, errors, strict=True):
        np.matmul(e.mT, a, out=weight)
        np.add.reduce(e, axis=1, out=bias)
    return out
