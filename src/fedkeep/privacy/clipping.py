"""A learner whose mean gradient averages clipped gradients: the bound that the noise is made for."""

from __future__ import annotations

from dataclasses import dataclass

from fedkeep.core.ports import Learner, Measurements, Probe
from fedkeep.core.types import AnyArray, Batch, FloatArray, LocalTraining, Scores, Vector
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


@dataclass(frozen=True)
class ClippedLearner:
    """A learner like `exact`, except that its probes clip each sample's gradient before they average."""

    exact: Learner
    clip: float

    @property
    def size(self) -> int:
        return self.exact.size

    @property
    def gradient_size(self) -> int:
        return self.exact.gradient_size

    def initial(self, seed: int) -> Vector:
        return self.exact.initial(seed)

    def probe(self, model: Vector) -> Probe:
        return ClippedProbe(self.exact.probe(model), self.clip)

    def train(self, model: Vector, batch: Batch, weights: FloatArray, local: LocalTraining, seed: int) -> Vector:
        return self.exact.train(model, batch, weights, local, seed)

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        return self.exact.logits(model, x)
