"""What every backend has in common: flat models, its probe, how it trains, how batches of devices are stacked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np

from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.ports import FleetLearner, Job, Measurements
from fedkeep.core.types import AnyArray, Batch, IntArray, LocalTraining, Vector

Gradients: TypeAlias = Callable[[Sequence[Any], Any, Any, Any], Sequence[Any]]
"""From parameters, (C, *shape) each, samples (C, n, ...), labels and shares (C, n) to the gradients by each parameter
of the models' losses, multiplied by the shares and summed."""


@dataclass(frozen=True)
class Layout:
    """The names and shapes of a model's parameters, in the order in which they are flattened."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each parameter lies in the vector."""
        return tuple(slice(*ends) for ends in pairwise(accumulate(map(prod, self.shapes), initial=0)))

    @cached_property
    def size(self) -> int:
        return sum(map(prod, self.shapes))

    def views(self, vectors: Any) -> list[Any]:
        """Each parameter as a view of `vectors`, numpy's or torch's, whose last axis is P: (..., P) to (..., *shape).

        >>> weight, bias = Layout(("weight", "bias"), ((2, 3), (2,))).views(np.arange(8))
        >>> weight.tolist(), bias.tolist()
        ([[0, 1, 2], [3, 4, 5]], [6, 7])
        """
        self.require(vectors)
        lead = vectors.shape[:-1]
        return [vectors[..., part].reshape(lead + shape) for part, shape in zip(self.slices, self.shapes, strict=True)]

    def require(self, vectors: Any) -> None:
        """Raises where the last axis is not P."""
        if vectors.shape[-1] != self.size:
            raise FedkeepError(
                f"a vector of {vectors.shape[-1]} numbers does not fit a model of {self.size}: "
                "it comes from another architecture or other shape options"
            )

    def since(self, first: int) -> "Layout":
        """The layout of the parameters from number `first` on."""
        return Layout(self.names[first:], self.shapes[first:])


def require_layers(count: int | None, depth: int) -> int:
    """How many of `depth` layers are meant by the option `last_layers`; None: all."""
    if count is not None and not 1 <= count <= depth:
        raise ConfigError(f"last_layers must be between 1 and {depth}, got {count}")
    return depth if count is None else count


class FrozenModel:
    """The probe of a learner that measures many at once: a copy of one model."""

    def __init__(self, learner: FleetLearner, model: Vector) -> None:
        self._learner, self._model = learner, np.array(model, dtype=np.float32)

    def measure(self, batch: Batch) -> Measurements:
        return self._learner.measure_many([self._model], [batch])[0]


def descend(
    layout: Layout,
    valued: int,
    array: Callable[[AnyArray], Any],
    models: Any,
    jobs: Sequence[Job],
    local: LocalTraining,
    gradients: Gradients,
) -> None:
    """Weighted local SGD (Eq. 12) of C models, (C, P), in place, each by its job: the one loop of all backends.

    Corrections are of the last `valued` numbers. Only what numpy's and torch's arrays have in common is done here;
    `array` makes the backend's own of one of numpy's.
    """
    parameters = layout.views(models)
    x, y = (array(padded([getattr(job.batch, name) for job in jobs])) for name in ("x", "y"))
    gamma = array(padded([job.weights.astype(np.float32) for job in jobs]))
    rate, pull = local.learning_rate, local.learning_rate * local.proximal
    anchor = models + 0 if pull else None
    constant, tail = None, models[:, -valued:]
    if any(job.correction is not None for job in jobs):
        nothing = np.zeros(valued, dtype=np.float32)
        given = [nothing if job.correction is None or not job.weights.any() else job.correction for job in jobs]
        if any(own.shape != nothing.shape for own in given):
            raise ValueError(f"a correction cannot be broadcast to the {valued} valued parameters")
        constant = rate * array(padded(given))
    for index in minibatches(y.shape[1], local, jobs[0].seed):
        total = gamma[:, index].sum(1)[:, None]
        if not total.any():
            continue  # samples that all weigh nothing make no step
        share = gamma[:, index] * (rate / (total + (total == 0)))
        step = gradients(parameters, x[:, index], y[:, index], share)
        if anchor is not None:
            models -= pull * (models - anchor)
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter -= gradient  # noqa: PLW2901 - in place
        if constant is not None:
            tail -= constant


def minibatches(n: int, local: LocalTraining, seed: int) -> Iterator[IntArray | slice]:
    """The samples of each step, epoch after epoch; without a batch size each step takes them all (Eq. 12).

    >>> [step.tolist() for step in minibatches(3, LocalTraining(0.1, epochs=2, batch_size=2), seed=0)]
    [[2, 0], [1], [2, 1], [0]]
    """
    if local.batch_size is None or local.batch_size >= n:
        for _ in range(local.epochs):
            yield slice(None)
        return
    rng = np.random.default_rng(seed)
    for _ in range(local.epochs):
        order = rng.permutation(n)
        for start in range(0, n, local.batch_size):
            yield order[start : start + local.batch_size]


def padded(rows: Sequence[AnyArray]) -> AnyArray:
    """C arrays (n, ...) as one, (C, n, ...), short ones padded with zeros.

    >>> padded([np.array([1, 2]), np.array([3])]).tolist()
    [[1, 2], [3, 0]]
    """
    if len(rows) == 1:
        return rows[0][None]
    whole = np.zeros((len(rows), max(map(len, rows)), *rows[0].shape[1:]), dtype=rows[0].dtype)
    for place, own in zip(whole, rows, strict=True):
        place[: len(own)] = own
    return whole
