"""What the core asks of the world: a model to measure and train, and a place to keep samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedkeep.core.types import (
    AnyArray,
    Batch,
    FloatArray,
    IntArray,
    LocalTraining,
    Scores,
    State,
    StateSpec,
    Vector,
)

if TYPE_CHECKING:
    from fedkeep.core.gradients.layout import GradientLayout


class PerSampleGradients(Protocol):
    """One batch seen under one frozen model; quantities are computed when first asked for.

    "Gradient" is the gradient of a sample's loss by the valued parameters: all of them, or the last
    layers only.
    """

    def losses(self) -> Scores:
        """Give l(w, x, y) per sample."""

    def projections(self, direction: Vector) -> Scores:
        """Give <grad l(w, x, y), direction> per sample (Eq. 6), without an (n, P) matrix."""

    def inner(self, other: "PerSampleGradients") -> Scores:
        """Give <grad l(w, x, y), grad l(w', x, y)> per sample.

        `other` is this batch under w', by the same learner.
        """

    def norms(self) -> Scores:
        """Give ||grad l(w, x, y)|| per sample."""

    def head_norms(self) -> Scores:
        """Give the same norms over the last layer only."""

    def mean_gradient(self) -> Vector:
        """Average the samples' gradients over the batch (Eq. 7)."""

    def weighted_gradient(self, weights: Scores) -> Vector:
        """Average the gradients, each times its sample's weight: sum_i w_i grad_i / n."""

    def sketched_gradient(self, layout: "GradientLayout", weights: Scores) -> Vector:
        """Compute `weighted_gradient` in a layout.

        Backends that know the factors of a layer's gradient do it without making the gradient.
        """
        return layout.of_gradient(self.weighted_gradient(weights))

    def activations(self) -> AnyArray:
        """Give the inputs of the last layer, (n, d): a space in which regions can be drawn."""


class GradientProbe(Protocol):
    """A frozen model that measures samples."""

    def measure(self, batch: Batch) -> PerSampleGradients:
        """Measure a batch under the model."""


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """What one device trains on: samples, weights, the mini-batches' seed, a correction."""

    batch: Batch
    weights: FloatArray
    seed: int
    correction: Vector | None = None
    """Added to the gradient of every local step, over the valued parameters, which stand last;
    None: nothing."""


class Learner(Protocol):
    """An architecture and its loss, of which the core knows neither: models are flat vectors."""

    @property
    def size(self) -> int:
        """P, the number of parameters of a model."""

    @property
    def gradient_size(self) -> int:
        """The length of a gradient: P, or fewer where only the last layers are valued."""

    def tail(self, layers: int | None) -> int:
        """Count the parameters of the last `layers` valued layers; None: all that are valued."""

    def gradient_shapes(self, layers: int | None) -> tuple[tuple[int, ...], ...]:
        """Give the shapes of these parameters, in the order in which they are flattened."""

    def initial(self, seed: int) -> Vector:
        """Make a first model."""

    def probe(self, model: Vector) -> GradientProbe:
        """Freeze a model to measure under."""

    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        """Train by weighted local SGD from `model` (Eq. 12).

        A step whose samples all weigh nothing is none.
        """

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        """Compute class scores, (n, classes)."""


class FleetLearner(Learner, Protocol):
    """A learner that serves all participants of a round in one call."""

    def measure_many(
        self, models: Sequence[Vector], batches: Sequence[Batch]
    ) -> Sequence[PerSampleGradients]:
        """Measure as `probe(model).measure(batch)` does, for each pair."""

    def train_many(
        self, model: Vector, jobs: Sequence[TrainingJob], local: LocalTraining
    ) -> list[Vector]:
        """Train as `train` does, from the same model for each job."""


class OfferResult(IntEnum):
    """What became of an offered sample."""

    REFUSED = 0
    KEPT = 1
    REPLACED = 2
    """Kept, in place of another sample."""
    REFRESHED = 3
    """Stored already: its score was renewed."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results of offering a batch.

    Per sample: its OfferResult, the id it evicted (-1: none), its score and that to beat.

    A stored sample that comes again and is refused leaves: it evicts itself. The score to beat
    is NaN where the slot had room.
    """

    results: IntArray
    evicted: IntArray
    thresholds: Scores
    scores: Scores

    @staticmethod
    def concatenate(parts: "Sequence[Outcome]") -> "Outcome":
        """Put the outcomes of several batches together."""
        columns = zip(*((p.results, p.evicted, p.thresholds, p.scores) for p in parts), strict=True)
        return Outcome(*map(np.concatenate, columns))


@dataclass(frozen=True, eq=False)
class Stored:
    """What a store holds, oldest arrival first."""

    batch: Batch
    regions: IntArray
    scores: Scores
    arrivals: IntArray
    uses: IntArray
    """How many participations have trained on each sample."""


class Stateful(Protocol):
    """State that outlives a process."""

    def snapshot(self) -> State:
        """Take all that the rest of a run depends on, as plain arrays."""

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""


class DescribedState(Stateful, Protocol):
    """State whose arrays are known beforehand, so that a budget of bytes can count them."""

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""


class Store(DescribedState, Protocol):
    """A bounded top-k per region: the highest scores stay, the newest wins ties.

    A score of -inf is refused.
    """

    def configure(self, quotas: IntArray) -> list[int]:
        """Set the slots of each region; gives the ids of what was dropped, lowest first."""

    def offer(self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray) -> Outcome:
        """Offer samples in order, however a stream is cut into batches."""

    def stored(self) -> Stored:
        """Give what is stored, oldest arrival first."""

    def rescore(self, scores: Scores) -> list[int]:
        """Set new scores for all that is stored, in the order of `stored()`.

        A score of -inf drops a sample, whose id is returned.
        """

    def label_of(self, id_: int) -> Any:
        """Give the label of a stored sample; None if no sample of that id is stored."""

    def relabel(self, id_: int, label: Any, region: int, score: float) -> list[int]:
        """Correct the label of a stored sample, with its region and score; gives what goes."""

    def mark_used(self, ids: IntArray) -> None:
        """Count one more use of these samples, as far as they are still stored."""

    def expire(self, before: int) -> None:
        """Let samples older than arrival number `before` make way for any newcomer."""
