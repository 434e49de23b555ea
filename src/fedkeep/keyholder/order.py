"""Which velocities must be compared for a plan, and what any table with the same comparisons looks like.

The greedy plan compares velocities of one label (who sees most of it) and of one device (which of its labels is the
most frequent), asks which are above 0, and takes totals per label. Whoever knows these can plan without a velocity.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.errors import RefusedError
from fedkeep.core.fleet import Fleet
from fedkeep.core.types import FloatArray, IntArray

_ZERO = -1


@dataclass(frozen=True)
class Grid:
    """Levels of equal ratio for velocities between `slowest` and `fastest`; two of the same level are a tie."""

    levels: int
    slowest: float = 1e-3
    fastest: float = 1e4

    def __post_init__(self) -> None:
        within(self, "levels", least=1)
        if not 0 < self.slowest < self.fastest < math.inf:
            raise ValueError(f"slowest must lie between 0 and fastest, got {self.slowest} and {self.fastest}")

    def level_of(self, velocity: FloatArray) -> IntArray:
        """0 for a velocity of 0, else 1 to `levels`: what is seen at all is never taken for unseen."""
        if not (np.isfinite(velocity).all() and (velocity >= 0).all()):
            raise RefusedError("velocity", "it must be a finite number of at least 0: nothing was sent")
        within = np.clip(velocity, self.slowest, self.fastest)
        steps = np.log(within / self.slowest) / math.log(self.fastest / self.slowest) * (self.levels - 1)
        return np.where(velocity > 0, 1 + np.rint(steps), 0).astype(np.int64)


@dataclass(frozen=True, eq=False)
class OrderedFleet(Fleet):
    """A fleet of which only the order of velocities and the totals per label are known."""

    totals: FloatArray

    @cached_property
    def label_mass(self) -> FloatArray:
        return self.totals


@dataclass(frozen=True)
class Comparisons:
    """All comparisons a plan needs, numbered 0 to `count` - 1: of value `left` with value `right`, or with 0.

    Value number row * labels + label is the velocity of the device in that row.
    """

    devices: int
    labels: int

    @cached_property
    def pairs(self) -> tuple[IntArray, IntArray]:
        values = np.arange(self.devices * self.labels).reshape(self.devices, self.labels)
        upper, lower = np.triu_indices(self.devices, 1)
        first, second = np.triu_indices(self.labels, 1)
        left = [values[upper].ravel(), values[:, first].ravel(), values.ravel()]
        right = [values[lower].ravel(), values[:, second].ravel(), np.full(values.size, _ZERO)]
        return np.concatenate(left), np.concatenate(right)

    @property
    def count(self) -> int:
        return self.devices * self.labels * (self.devices + self.labels) // 2

    def contribution(self, row: int, values: FloatArray) -> FloatArray:
        """What the device in this row adds: summed over all rows, each place holds left minus right."""
        everything = np.zeros(self.devices * self.labels + 1)
        everything[row * self.labels : (row + 1) * self.labels] = values
        left, right = self.pairs
        return everything[left] - everything[right]

    def table(self, signs: IntArray) -> IntArray:
        """The smallest (devices, labels) table of whole numbers that compares like this, 0 where a velocity is 0."""
        left, right = self.pairs
        heights = np.zeros(self.devices * self.labels + 1, dtype=np.int64)
        for _ in range(len(heights) + 1):
            before = heights.copy()
            np.maximum.at(heights, left, heights[right] + (signs > 0) - len(heights) * (signs < 0))
            np.maximum.at(heights, right, heights[left] + (signs < 0) - len(heights) * (signs > 0))
            if heights[_ZERO] > 0:
                break
            if np.array_equal(heights, before):
                return heights[:-1].reshape(self.devices, self.labels)
        raise RefusedError("comparisons", "they contradict each other: a device did not follow the protocol")
