"""Measurements of a batch as part of a larger one, or put off until somebody asks."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

from fedkeep.core.ports import Measurements
from fedkeep.core.types import AnyArray, Scores, Vector

Kind = TypeVar("Kind")


class SliceOf:
    """A part of a measured batch, for scoring: its samples' own quantities, but no mean over them."""

    def __init__(self, whole: Measurements, part: slice) -> None:
        self._whole, self._part = whole, part

    def losses(self) -> Scores:
        return self._whole.losses()[self._part]

    def projections(self, direction: Vector) -> Scores:
        return self._whole.projections(direction)[self._part]

    def inner(self, other: Measurements) -> Scores:
        same = of_kind(SliceOf, other)
        if same._part != self._part:
            raise TypeError("two parts of measured batches have inner products only if they are the same part")
        return self._whole.inner(same._whole)[self._part]

    def norms(self) -> Scores:
        return self._whole.norms()[self._part]

    def head_norms(self) -> Scores:
        return self._whole.head_norms()[self._part]

    def activations(self) -> AnyArray:
        return self._whole.activations()[self._part]

    def mean_gradient(self) -> Vector:
        raise TypeError("a part of a measured batch has no mean gradient; measure it as a batch of its own")

    def weighted_gradient(self, weights: Scores) -> Vector:  # noqa: ARG002
        return self.mean_gradient()


class Deferred:
    """Measurements that are begun when first asked for; a policy that never asks costs nothing."""

    def __init__(self, measure: Callable[[], Measurements]) -> None:
        self.measured = cache(measure)
        """The measurements themselves, begun now at the latest."""
        self._projected: tuple[Vector, Scores] | None = None

    def losses(self) -> Scores:
        return self.measured().losses()

    def projections(self, direction: Vector) -> Scores:
        """Kept for the direction asked for last: the parts of a batch all ask for the same."""
        if self._projected is None or self._projected[0] is not direction:
            self._projected = (direction, self.measured().projections(direction))
        return self._projected[1]

    def inner(self, other: Measurements) -> Scores:
        return self.measured().inner(other)

    def norms(self) -> Scores:
        return self.measured().norms()

    def head_norms(self) -> Scores:
        return self.measured().head_norms()

    def activations(self) -> AnyArray:
        return self.measured().activations()

    def mean_gradient(self) -> Vector:
        return self.measured().mean_gradient()

    def weighted_gradient(self, weights: Scores) -> Vector:
        return self.measured().weighted_gradient(weights)


def of_kind(kind: type[Kind], other: object) -> Kind:
    """`other`, or what it defers to, as measurements of this kind."""
    plain = other.measured() if isinstance(other, Deferred) else other
    if not isinstance(plain, kind):
        raise TypeError(f"{kind.__name__} and {type(plain).__name__} have no inner product: measure both in one way")
    return plain
