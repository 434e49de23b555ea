"""What the core asks of the world: a model to measure and train, and a place to keep samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

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
    """One batch seen under one frozen model; each quantity is computed when first asked for, then kept.

    "Gradient" is the gradient of a sample's loss by the valued parameters: all of them, or the last layers only.
    """

    def losses(self) -> Scores:
        """l(w, x, y) per sample."""

    def projections(self, direction: Vector) -> Scores:
        """<grad l(w, x, y), direction> per sample (Eq. 6), never by way of an (n, P) matrix."""

    def inner(self, other: "PerSampleGradients") -> Scores:
        """<grad l(w, x, y), grad l(w', x, y)> per sample; `other` is this batch under w', by the same learner."""

    def norms(self) -> Scores:
        """||grad l(w, x, y)|| per sample."""

    def head_norms(self) -> Scores:
        """The same norms over the last layer only: what importance sampling by upper bound uses."""

    def mean_gradient(self) -> Vector:
        """The mean over the batch of the samples' gradients (Eq. 7)."""

    def weighted_gradient(self, weights: Scores) -> Vector:
        """The same mean with each gradient multiplied by its sample's weight: sum_i w_i grad_i / n."""

    def sketched_gradient(self, layout: "GradientLayout", weights: Scores) -> Vector:
        """Compute `weighted_gradient` in a layout.

        Backends that know the factors of a layer's gradient do it without making the gradient.
        """
        return layout.of_gradient(self.weighted_gradient(weights))

    def activations(self) -> AnyArray:
        """The inputs of the last layer, (n, d): a space in which regions can be drawn."""


class GradientProbe(Protocol):
    """A frozen model that measures samples."""

    def measure(self, batch: Batch) -> PerSampleGradients: ...


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """What one device trains on: its samples, what each counts, the seed of its mini-batches, what mends its steps."""

    batch: Batch
    weights: FloatArray
    seed: int
    correction: Vector | None = None
    """Added to the gradient of every local step, over the valued parameters, which stand last; None: nothing."""


class Learner(Protocol):
    """An architecture and its loss; models are flat vectors, so that the core needs to know neither."""

    @property
    def size(self) -> int:
        """P, the number of parameters of a model."""

    @property
    def gradient_size(self) -> int:
        """The length of a direction: P, or fewer where only the last layers are valued ("simplified")."""

    def tail(self, layers: int | None) -> int:
        """How many parameters the last `layers` valued layers have; None: all that are valued."""

    def gradient_shapes(self, layers: int | None) -> tuple[tuple[int, ...], ...]:
        """Give the shapes of these parameters, in the order in which they are flattened."""

    def initial(self, seed: int) -> Vector: ...

    def probe(self, model: Vector) -> GradientProbe: ...

    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        """Weighted local SGD from `model` (Eq. 12); a step whose samples all weigh nothing is none."""

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        """Class scores, (n, classes)."""


class FleetLearner(Learner, Protocol):
    """A learner that serves all participants of a round in one call, batched where that is faster than a loop."""

    def measure_many(
        self, models: Sequence[Vector], batches: Sequence[Batch]
    ) -> Sequence[PerSampleGradients]:
        """`probe(model).measure(batch)` for each pair."""

    def train_many(
        self, model: Vector, jobs: Sequence[TrainingJob], local: LocalTraining
    ) -> list[Vector]:
        """`train` from the same model for each job."""


class OfferResult(IntEnum):
    """What became of an offered sample."""

    REFUSED = 0
    KEPT = 1
    REPLACED = 2
    """Stateful, in place of another sample."""
    REFRESHED = 3
    """Stored already: its score was renewed."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The fates of an offered batch: per sample its OfferResult, the id it displaced (-1: none), its score and that to beat.

    A stored sample that comes again and is refused leaves: it displaces itself. The score to beat is NaN where the slot
    had room.
    """

    fates: IntArray
    displaced: IntArray
    floors: Scores
    scores: Scores

    @staticmethod
    def concatenate(parts: "Sequence[Outcome]") -> "Outcome":
        columns = zip(*((p.fates, p.displaced, p.floors, p.scores) for p in parts), strict=True)
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
    """A bounded top-k per region: the highest scores stay, the newest wins ties, -inf is refused."""

    def configure(self, quotas: IntArray) -> list[int]:
        """Sets the slots of each region; the ids of what no longer fits and was dropped, lowest first."""

    def offer(self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray) -> Outcome:
        """Offers samples in order; the result does not depend on how a stream is cut into batches."""

    def stored(self) -> Stored: ...

    def rescore(self, scores: Scores) -> list[int]:
        """New scores for all that is stored, in the order of `stored()`; -inf drops a sample, whose id is returned."""

    def mark_used(self, ids: IntArray) -> None:
        """These have been trained on once more, as far as they are still stored."""

    def expire(self, before: int) -> None:
        """Samples that arrived before arrival number `before` make way for any newcomer."""
