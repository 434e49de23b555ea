"""Measurements of a batch as part of a larger one, or put off until somebody asks."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.types import Scores, Vector

Kind = TypeVar("Kind")


class SliceOf:
    """A part of a measured batch, for scoring: its samples' own quantities, but no mean over them."""

    def __init__(self, whole: PerSampleGradients, part: slice) -> None:
        self._whole, self._part = whole, part

    def __getattr__(self, quantity: str) -> Callable[..., Any]:
        return lambda *by: getattr(self._whole, quantity)(*by)[self._part]

    def mean_gradient(self, *_: Scores) -> Vector:
        raise TypeError(
            "a part of a measured batch has no mean gradient; measure it as a batch of its own"
        )

    weighted_gradient = mean_gradient


class Deferred:
    """Measurements that are begun when first asked for; a policy that never asks costs nothing."""

    def __init__(self, measure: Callable[[], PerSampleGradients]) -> None:
        self.measured = cache(measure)
        """The measurements themselves, begun now at the latest."""
        self._projected: tuple[Vector, Scores] | None = None

    def __getattr__(self, quantity: str) -> Any:
        return getattr(self.measured(), quantity)

    def projections(self, direction: Vector) -> Scores:
        """Stateful for the direction asked for last: the parts of a batch all ask for the same."""
        if self._projected is None or self._projected[0] is not direction:
            self._projected = (direction, self.measured().projections(direction))
        return self._projected[1]


def slice_of(whole: PerSampleGradients, part: slice) -> PerSampleGradients:
    return cast(PerSampleGradients, SliceOf(whole, part))


def deferred(measure: Callable[[], PerSampleGradients]) -> PerSampleGradients:
    return cast(PerSampleGradients, Deferred(measure))


def of_kind(kind: type[Kind], other: object) -> Kind:
    """`other`, or what it defers to, as measurements of this kind."""
    plain = other.measured() if isinstance(other, Deferred) else other
    if not isinstance(plain, kind):
        raise TypeError(
            f"{kind.__name__} and {type(plain).__name__} have no inner product: measure both in one way"
        )
    return plain
