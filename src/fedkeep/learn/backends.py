"""What every backend has in common: flat models, its probe, how it trains, what it measures.

A sample's gradient by the weight of a layer is bilinear in the layer's input `a` and output error
`e`, so that sums, projections and inner products of gradients are had without an (n, P) matrix.
Arrays are (C, n, ...) for C models over their own n samples, or (n, ...) for one of them.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.gradients.layout import Block, GradientLayout
from fedkeep.core.protocols import FleetLearner, PerSampleGradients, TrainingJob
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Batch, IntArray, LocalTraining, Scores, Vector

KEPT_BYTES = 1 << 28
"""Bytes of the passes over one batch that are kept; what exceeds them is computed again."""


@dataclass(frozen=True)
class Layout:
    """The names and shapes of a model's parameters, in the order in which they are flattened."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each parameter lies in the vector."""
        return tuple(
            slice(*ends) for ends in pairwise(accumulate(map(prod, self.shapes), initial=0))
        )

    @cached_property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(map(prod, self.shapes))

    def views(self, vectors: Any) -> list[Any]:
        """View vectors, numpy's or torch's, parameter by parameter: (..., P) to (..., *shape).

        >>> weight, bias = Layout(("weight", "bias"), ((2, 3), (2,))).views(np.arange(8))
        >>> weight.tolist(), bias.tolist()
        ([[0, 1, 2], [3, 4, 5]], [6, 7])
        """
        self.require(vectors)
        lead = vectors.shape[:-1]
        return [
            vectors[..., part].reshape(lead + shape)
            for part, shape in zip(self.slices, self.shapes, strict=True)
        ]

    def require(self, vectors: Any) -> None:
        """Raise where the last axis is not P."""
        if vectors.shape[-1] != self.size:
            raise FedkeepError(
                f"a vector of {vectors.shape[-1]} numbers does not fit a model of {self.size}: "
                "it comes from another architecture or other shape options"
            )

    def since(self, first: int) -> "Layout":
        """Leave out the parameters before number `first`."""
        return Layout(self.names[first:], self.shapes[first:])


def require_layers(count: int | None, depth: int) -> int:
    """How many of `depth` layers are meant by the option `last_layers`; None: all."""
    if count is not None and not 1 <= count <= depth:
        raise ConfigError(f"last_layers must be between 1 and {depth}, got {count}")
    return depth if count is None else count


class FrozenModel:
    """The probe of a learner that measures many at once: a copy of one model.

    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> learner = DenseLearner((2, 2))
    >>> batch = Batch(np.eye(2, dtype=np.float32), np.array([0, 1]), np.arange(2))
    >>> measured: PerSampleGradients = FrozenModel(learner, np.zeros(learner.size)).measure(batch)
    >>> of_kind(BatchMeasurements, measured).losses().round(3).tolist()  # log 2
    [0.693, 0.693]
    """

    def __init__(self, learner: FleetLearner, model: Vector) -> None:
        self._learner, self._model = learner, np.array(model, dtype=np.float32)

    def measure(self, batch: Batch) -> PerSampleGradients:
        """Measure a batch under the model."""
        return self._learner.measure_many([self._model], [batch])[0]


def local_sgd(
    layout: Layout,
    valued: int,
    array: Callable[[AnyArray], Any],
    models: Any,
    jobs: Sequence[TrainingJob],
    local: LocalTraining,
    gradients: Callable[[Sequence[Any], Any, Any, Any], Sequence[Any]],
) -> None:
    """Train C models in place by weighted local SGD (Eq. 12): the one loop of all backends.

    Only what numpy's and torch's arrays have in common is done here.

    Parameters
    ----------
    layout
        Names and shapes of the parameters.
    valued
        How many of the last numbers of a model corrections are of.
    array
        Makes the backend's own array of one of numpy's.
    models
        The models, (C, P).
    jobs
        What each of them trains on.
    local
        Rate, epochs and batch size.
    gradients
        From parameters, (C, *shape) each, samples, labels and shares, (C, n), to the gradients by
        each parameter, multiplied by the shares and summed.
    """
    parameters = layout.views(models)
    x, y = (array(padded([getattr(job.batch, name) for job in jobs])) for name in ("x", "y"))
    gamma = array(padded([job.weights.astype(np.float32) for job in jobs]))
    rate, pull = local.learning_rate, local.learning_rate * local.proximal
    anchor = models + 0 if pull else None
    constant, tail = None, models[:, -valued:]
    if any(job.correction is not None for job in jobs):
        nothing = np.zeros(valued, dtype=np.float32)
        given = [
            nothing if job.correction is None or not job.weights.any() else job.correction
            for job in jobs
        ]
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
    """Draw the samples of each step; without a batch size each step takes them all (Eq. 12).

    >>> local = LocalTraining(0.1, epochs=2, batch_size=2)
    >>> [step.tolist() for step in minibatches(3, local, seed=0)]
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


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """The samples' gradients by a linear layer, as outer products.

    The factors are its errors, and its inputs with a one for the bias. Gradients themselves are
    outer products, too: with ones for errors, and no bias.
    """

    a: Any
    e: Any
    bias: bool = True

    @property
    def size(self) -> int:
        """How many parameters the layer has; they stand side by side in a flat vector."""
        return int(self.e.shape[-1] * (self.a.shape[-1] + self.bias))

    def of(self, c: int, n: int) -> "LayerFactors":
        """Take the first n samples of model c."""
        return LayerFactors(self.a[c, :n], self.e[c, :n], self.bias)

    def inner(self, other: "LayerFactors") -> AnyArray:
        """<grad_i, grad'_i> per sample: for outer products, the product of the factors' own."""
        return np.asarray((np.vecdot(self.a, other.a) + self.bias) * np.vecdot(self.e, other.e))

    def project(self, direction: Vector) -> AnyArray:
        """<grad_i, direction> per sample, as e . (weight a + bias)."""
        weight, bias = self._views(direction)
        response = self.a @ weight.T
        if self.bias:
            response += bias
        return np.asarray(np.vecdot(self.e, response))

    def add_up(self, shares: Vector, out: Vector) -> None:
        """Write sum_i shares_i grad_i into `out`."""
        weight, bias = self._views(out)
        e = self.e * shares[:, None]
        np.matmul(e.T, self.a, out=weight)
        if self.bias:
            np.add.reduce(e, axis=0, out=bias)

    def represent(self, shares: Vector, blocks: Sequence[Block]) -> Iterator[Vector]:
        """Represent sum_i shares_i grad_i in the blocks of the layer's weight and bias.

        Parameters
        ----------
        shares : Vector
            One for each sample, (n,).
        blocks : sequence of Block
            Of the layer's parameters, in their order.
        """
        outputs, inputs = self.e.shape[-1], self.a.shape[-1]
        if blocks[0].parameters == outputs * inputs:
            e = self.e * shares[:, None]
            yield blocks[0].of_products(e, self.a)
            if self.bias:
                yield np.add.reduce(e, axis=0)
        else:  # the factors are gradients of weight and bias side by side
            yield from self._represent_sum(shares, blocks)

    def _represent_sum(self, shares: Vector, blocks: Sequence[Block]) -> Iterator[Vector]:
        """Do the same by way of the gradient itself."""
        gradient = np.empty(self.size, dtype=np.float32)
        self.add_up(shares, gradient)
        start = 0
        for block in blocks:
            yield block.of_gradient(gradient[start : (start := start + block.parameters)])

    def _views(self, vector: Vector) -> tuple[AnyArray, AnyArray]:
        outputs, inputs = self.e.shape[-1], self.a.shape[-1]
        return vector[: outputs * inputs].reshape(outputs, inputs), vector[outputs * inputs :]


class BatchMeasurements(PerSampleGradients):
    """What follows from the other measurements of n samples."""

    _n: int
    nbytes = 0  # what is kept for later questions

    def norms(self) -> Scores:
        """Compute the norm of each sample's gradient."""
        return np.sqrt(self.inner(self))

    def mean_gradient(self) -> Vector:
        """Average the samples' gradients."""
        return self.weighted_gradient(np.ones(self._n))


class FactoredMeasurements(BatchMeasurements):
    """Measurements of n samples from the factors of the valued layers."""

    @abstractmethod
    def _last(self, wanted: int | None = None) -> Sequence[LayerFactors]:
        """At least the last `wanted` valued layers; None: all of them."""

    def projections(self, direction: Vector) -> Scores:
        """Project each sample's gradient on a direction."""
        return _summed(
            factors.project(own) for factors, own in _with_parts_of(direction, self._last())
        )

    def inner(self, other: PerSampleGradients) -> Scores:
        """Multiply each sample's gradient by its gradient in other measurements."""
        theirs = self if other is self else of_kind(FactoredMeasurements, other)  # type: ignore[type-abstract]
        return _summed(
            mine.inner(same) for mine, same in zip(self._last(), theirs._last(), strict=True)
        )

    def head_norms(self) -> Scores:
        """Compute the norm of each sample's gradient by the last layer."""
        head = self._last(1)[-1]
        return np.sqrt(_summed([head.inner(head)]))

    def weighted_gradient(self, weights: Scores) -> Vector:
        """Average the samples' gradients, each multiplied by its weight."""
        shares = (weights / max(1, self._n)).astype(np.float32)
        layers = self._last()
        gradient = np.empty(sum(factors.size for factors in layers), dtype=np.float32)
        for factors, own in _with_parts_of(gradient, layers):
            factors.add_up(shares, own)
        return gradient

    def sketched_gradient(self, layout: GradientLayout, weights: Scores) -> Vector:
        """Return the weighted mean gradient as a sketch of this layout."""
        shares = (weights / max(1, self._n)).astype(np.float32)
        numbers = np.empty(layout.size, dtype=np.float32)
        blocks, parts = list(layout.blocks), list(layout.parts)
        for factors in reversed(self._last()):
            of_layer: list[Block] = []
            while blocks and sum(block.parameters for block in of_layer) < factors.size:
                of_layer.insert(0, blocks.pop())
            if not of_layer:  # the layout covers the last layers only
                break
            own = parts[-len(of_layer) :]
            del parts[-len(of_layer) :]
            for part, found in zip(own, factors.represent(shares, of_layer), strict=True):
                numbers[part] = found
        return numbers


class TracedMeasurements(FactoredMeasurements):
    """The `n` samples of device `c` of a backend's trace.

    A trace is the passes of C models, made when asked, short batches padded. Its `losses` are
    (C, n), `activations`, the last layer's inputs, (C, n, d), `head` and `valued` the factors.
    """

    def __init__(self, trace: Any, n: int, c: int = 0) -> None:
        self._trace, self._n, self._c = trace, n, c

    def losses(self) -> Scores:
        """Compute the loss of each sample."""
        losses: AnyArray = self._trace.losses
        return losses[self._c, : self._n].astype(np.float64)

    def activations(self) -> AnyArray:
        """Give the inputs of the last layer, (n, d)."""
        activations: AnyArray = self._trace.activations
        return activations[self._c, : self._n].copy()

    def _last(self, wanted: int | None = None) -> Sequence[LayerFactors]:
        return [self._head] if wanted == 1 else self._valued

    @cached_property
    def _head(self) -> LayerFactors:
        head: LayerFactors = self._trace.head
        return head.of(self._c, self._n)

    @cached_property
    def _valued(self) -> list[LayerFactors]:
        return [factors.of(self._c, self._n) for factors in self._trace.valued]


class ChunkedMeasurements(BatchMeasurements):
    """A large batch in pieces; an empty one, which many layers would refuse, in none."""

    def __init__(
        self,
        measure: Callable[[Batch], BatchMeasurements],
        batch: Batch,
        samples: int,
        gradient_size: int,
    ) -> None:
        self._measure, self._batch, self._n, self._size = measure, batch, len(batch), gradient_size
        self._parts = [slice(start, start + samples) for start in range(0, len(batch), samples)]
        self._kept: dict[int, BatchMeasurements] = {}

    def losses(self) -> Scores:
        """Compute the loss of each sample."""
        return _joined(piece.losses() for piece in self._pieces())

    def projections(self, direction: Vector) -> Scores:
        """Project each sample's gradient on a direction."""
        return _joined(piece.projections(direction) for piece in self._pieces())

    def inner(self, other: PerSampleGradients) -> Scores:
        """Multiply each sample's gradient by its gradient in other measurements."""
        theirs = of_kind(ChunkedMeasurements, other)
        if theirs is self:
            return _joined(piece.inner(piece) for piece in self._pieces())
        return _joined(
            mine.inner(same) for mine, same in zip(self._pieces(), theirs._pieces(), strict=True)
        )

    def head_norms(self) -> Scores:
        """Compute the norm of each sample's gradient by the last layer."""
        return _joined(piece.head_norms() for piece in self._pieces())

    def weighted_gradient(self, weights: Scores) -> Vector:
        """Average the samples' gradients, each multiplied by its weight."""
        total = np.zeros(self._size, dtype=np.float32)
        for piece, part in zip(self._pieces(), self._parts, strict=True):
            own = weights[part]
            total += piece.weighted_gradient(own * (len(own) / self._n))
        return total

    def sketched_gradient(self, layout: GradientLayout, weights: Scores) -> Vector:
        """Return the weighted mean gradient of all pieces as a sketch of this layout."""
        total = np.zeros(layout.size, dtype=np.float32)
        for piece, part in zip(self._pieces(), self._parts, strict=True):
            own = weights[part]
            total += piece.sketched_gradient(layout, own * (len(own) / self._n))
        return total

    def activations(self) -> AnyArray:
        """Give the inputs of the last layer, (n, d)."""
        parts = [piece.activations() for piece in self._pieces()]
        return np.concatenate(parts) if parts else np.zeros((0, 0), dtype=np.float32)

    def _pieces(self) -> Iterator[BatchMeasurements]:
        for index, part in enumerate(self._parts):
            piece = self._kept.pop(index, None) or self._measure(self._batch.take(part))
            yield piece  # before it is asked something, it holds nothing
            if piece.nbytes + sum(kept.nbytes for kept in self._kept.values()) <= KEPT_BYTES:
                self._kept[index] = piece


def _with_parts_of(
    vector: Vector, layers: Sequence[LayerFactors]
) -> Iterator[tuple[LayerFactors, Vector]]:
    """Every layer beside its part of a vector."""
    start = 0
    for factors in layers:
        yield factors, vector[start : (start := start + factors.size)]


def _summed(parts: Iterable[AnyArray]) -> Scores:
    """Add up the layers' parts of a number per sample, in float64."""
    first, *rest = parts
    return sum(rest, first.astype(np.float64))


def _joined(parts: Iterable[Scores]) -> Scores:
    return np.concatenate([np.zeros(0), *parts])
