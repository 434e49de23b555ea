"""Gradients of a batch that is part of a larger one, or that are computed when asked for."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.types import Scores, Vector

Kind = TypeVar("Kind")


class SliceOf:
    """A part of a measured batch: its samples' own quantities, but no mean over them."""

    def __init__(self, whole: PerSampleGradients, part: slice) -> None:
        self._whole, self._part = whole, part

    def __getattr__(self, quantity: str) -> Callable[..., Any]:
        return lambda *by: getattr(self._whole, quantity)(*by)[self._part]

    def mean_gradient(self, *_: Scores) -> Vector:
        """Raise: a mean over a part would be taken for one over the batch."""
        raise TypeError(
            "a part of a measured batch has no mean gradient; measure it as a batch of its own"
        )

    weighted_gradient = mean_gradient


class Deferred:
    """Measurements made when first asked for; a policy that never asks costs nothing."""

    def __init__(self, measure: Callable[[], PerSampleGradients]) -> None:
        self.measured = cache(measure)
        """The measurements themselves."""
        self._projected: tuple[Vector, Scores] | None = None

    def __getattr__(self, quantity: str) -> Any:
        return getattr(self.measured(), quantity)

    def projections(self, direction: Vector) -> Scores:
        """Return the projections; those on the last direction are kept, as all parts ask for it."""
        if self._projected is None or self._projected[0] is not direction:
            self._projected = (direction, self.measured().projections(direction))
        return self._projected[1]


def slice_of(whole: PerSampleGradients, part: slice) -> PerSampleGradients:
    """Return the measurements of a part of a measured batch."""
    return cast(PerSampleGradients, SliceOf(whole, part))


def deferred(measure: Callable[[], PerSampleGradients]) -> PerSampleGradients:
    """Return measurements that are made when first asked for."""
    return cast(PerSampleGradients, Deferred(measure))


def of_kind(kind: type[Kind], other: object) -> Kind:
    """Return `other`, or what it defers to, as measurements of this kind.

    Raises
    ------
    TypeError
        If it is of another kind.
    """
    plain = other.measured() if isinstance(other, Deferred) else other
    if not isinstance(plain, kind):
        raise TypeError(
            f"{kind.__name__} and {type(plain).__name__} have no inner product: "
            "measure both in one way"
        )
    return plain
