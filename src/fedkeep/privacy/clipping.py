"""A learner whose mean gradient averages clipped gradients: the bound that the noise is made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedkeep.core.ports import FleetLearner, Job, Learner, Measurements, Probe
from fedkeep.core.slices import of_same_kind
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Scores, Vector
from fedkeep.privacy.gaussian import clip_weights


@dataclass(frozen=True)
class ClippedMeasurements:
    """Measurements of which only what leaves the device, the mean gradient, is clipped; scores stay exact."""

    exact: Measurements
    clip: float

    def losses(self) -> Scores:
        return self.exact.losses()

    def projections(self, direction: Vector) -> Scores:
        return self.exact.projections(direction)

    def inner(self, other: Measurements) -> Scores:
        return self.exact.inner(of_same_kind(self, other).exact)

    def norms(self) -> Scores:
        return self.exact.norms()

    def head_norms(self) -> Scores:
        return self.exact.head_norms()

    def mean_gradient(self) -> Vector:
        """The mean of the samples' gradients, each shortened to `clip` first, so never longer than `clip`."""
        return self.exact.weighted_gradient(clip_weights(self.exact.norms(), self.clip))

    def weighted_gradient(self, weights: Scores) -> Vector:
        return self.exact.weighted_gradient(weights * clip_weights(self.exact.norms(), self.clip))

    def activations(self) -> AnyArray:
        return self.exact.activations()


@dataclass(frozen=True)
class ClippedProbe:
    """A probe whose measurements are clipped."""

    exact: Probe
    clip: float

    def measure(self, batch: Batch) -> Measurements:
        return ClippedMeasurements(self.exact.measure(batch), self.clip)


class ClippedLearner:
    """A learner like `exact`, except that its probes clip each sample's gradient before they average."""

    def __init__(self, exact: Learner, clip: float) -> None:
        self._exact, self._clip = exact, clip

    @property
    def size(self) -> int:
        return self._exact.size

    @property
    def gradient_size(self) -> int:
        return self._exact.gradient_size

    def tail(self, layers: int | None) -> int:
        return self._exact.tail(layers)

    def initial(self, seed: int) -> Vector:
        return self._exact.initial(seed)

    def probe(self, model: Vector) -> Probe:
        return ClippedProbe(self._exact.probe(model), self._clip)

    def train(self, model: Vector, job: Job, local: LocalTraining) -> Vector:
        return self._exact.train(model, job, local)

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        return self._exact.logits(model, x)


class ClippedFleetLearner(ClippedLearner):
    """The same for a learner that serves many devices at once."""

    def __init__(self, exact: FleetLearner, clip: float) -> None:
        super().__init__(exact, clip)
        self._fleet = exact

    def measure_many(self, models: Sequence[Vector], batches: Sequence[Batch]) -> list[ClippedMeasurements]:
        return [ClippedMeasurements(exact, self._clip) for exact in self._fleet.measure_many(models, batches)]

    def train_many(self, model: Vector, jobs: Sequence[Job], local: LocalTraining) -> list[Vector]:
        return self._fleet.train_many(model, jobs, local)
