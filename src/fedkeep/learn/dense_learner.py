"""Dense networks without torch: the base install trains and values with these.

Softmax regression is the network without a hidden layer, `DenseLearner((features, classes))`. The flat order
is torch's: weight (out, in), then bias, layer by layer.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.ports import Job
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Vector
from fedkeep.learn.dense import DenseTrace, Layers, forward, gradients, paired
from fedkeep.learn.flat import Layout, require_layers
from fedkeep.learn.jobs import FrozenModel, descend, padded
from fedkeep.learn.measurements import TracedMeasurements

STACKED_NUMBERS = 1_000_000
CACHED_NUMBERS = 1 << 17
"""Parameters of models trained side by side: more do not stay in the cache from step to step."""


class DenseLearner:
    """A dense network of given layer widths, inputs first; `last_layers` restricts the valued parameters.

    >>> learner = DenseLearner((2, 3))  # softmax regression
    >>> model = np.zeros(learner.size, dtype=np.float32)
    >>> batch = Batch(np.array([[1.0, 0.0]]), np.array([2]), np.array([0]))
    >>> seen = learner.probe(model).measure(batch)
    >>> seen.losses().round(3).tolist()  # log 3
    [1.099]
    >>> trained = learner.train(model, Job(batch, weights=np.ones(1), seed=0), LocalTraining(0.5, epochs=10))
    >>> bool(learner.probe(trained).measure(batch).losses()[0] < 0.2)
    True
    """

    def __init__(self, widths: Sequence[int], last_layers: int | None = None) -> None:
        depth = len(widths) - 1
        if depth < 1 or min(widths) < 1:
            raise ConfigError(f"widths must be two or more positive numbers, got {tuple(widths)}")
        self.widths = tuple(widths)
        self._first = depth - require_layers(last_layers, depth)
        self.layout = _layout(self.widths)
        self._valued = self.layout.since(2 * self._first)
        self.size, self.gradient_size = self.layout.size, self._valued.size

    def tail(self, layers: int | None) -> int:
        valued = len(self.widths) - 1 - self._first
        return self._valued.since(2 * (valued - require_layers(layers, valued))).size

    def initial(self, seed: int) -> Vector:
        """Uniform within 1/sqrt(inputs), the custom of torch's linear layers."""
        rng = np.random.default_rng(seed)
        bounds = [fan_in**-0.5 for fan_in in self.widths[:-1] for _ in ("weight", "bias")]
        parts = [rng.uniform(-b, b, prod(s)) for b, s in zip(bounds, self.layout.shapes, strict=True)]
        return np.concatenate(parts).astype(np.float32)

    def probe(self, model: Vector) -> FrozenModel:
        return FrozenModel(self, model)

    def measure_many(self, models: Sequence[Vector], batches: Sequence[Batch]) -> list[TracedMeasurements]:
        """What each batch's own model sees in it."""
        if not self._stackable(batches):
            return [self.measure_many([m], [b])[0] for m, b in zip(models, batches, strict=True)]
        shared = all(model is models[0] for model in models)
        layers = self._layers(models[0][None] if shared else np.stack(models))
        y = padded([batch.y for batch in batches])
        trace = DenseTrace(lambda: forward(layers, padded([batch.x for batch in batches])), y, layers, self._first)
        return [TracedMeasurements(trace, self.gradient_size, len(batch), c) for c, batch in enumerate(batches)]

    def train(self, model: Vector, job: Job, local: LocalTraining) -> Vector:
        return self._train_stacked(model, [job], local)[0]

    def train_many(self, model: Vector, jobs: Sequence[Job], local: LocalTraining) -> list[Vector]:
        """Where each job leads from the same model; mini-batches are not aligned, so they go one by one."""
        if local.batch_size is not None or not self._stackable([job.batch for job in jobs]):
            return [self.train(model, job, local) for job in jobs]
        together = max(1, CACHED_NUMBERS // self.size)
        groups = [jobs[start : start + together] for start in range(0, len(jobs), together)]
        return [trained for group in groups for trained in self._train_stacked(model, group, local)]

    def _train_stacked(self, model: Vector, jobs: Sequence[Job], local: LocalTraining) -> list[Vector]:
        models = np.repeat(np.asarray(model, dtype=np.float32)[None], len(jobs), axis=0)
        parameters = self.layout.views(models)
        into_room = partial(gradients, [np.empty_like(parameter) for parameter in parameters])
        with np.errstate(over="ignore", invalid="ignore"):
            descend(models, parameters, jobs, local, into_room, valued=self.gradient_size)
        return list(models)

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        _, logits = forward(self._layers(model[None]), x[None])
        scores: AnyArray = logits[0]
        return scores

    def _layers(self, models: AnyArray) -> Layers:
        return paired(self.layout.views(models))

    def _stackable(self, batches: Sequence[Batch]) -> bool:
        """Whether one call for all is faster: where calls cost more than copying and padding."""
        padded = len(batches) * max(map(len, batches), default=0)
        small = 0 < padded * self.widths[0] <= STACKED_NUMBERS
        return len(batches) == 1 or (small and padded <= 2 * sum(map(len, batches)))


def _layout(widths: Sequence[int]) -> Layout:
    names, shapes = [], []
    for index, (fan_in, fan_out) in enumerate(pairwise(widths)):
        names += [f"{index}.weight", f"{index}.bias"]
        shapes += [(fan_out, fan_in), (fan_out,)]
    return Layout(tuple(names), tuple(shapes))
