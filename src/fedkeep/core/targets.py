"""Targets that are numbers to predict, beside labels: how they look, and how they are divided.

A batch's `y` is labels, int64, or such targets, float64; what is made of them is decided here and
in the loss alone. Everything else of the core takes regions, which are whole numbers either way.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.types import AnyArray, BoolArray, FloatArray, IntArray

LARGEST_TARGET = 1e12
"""The largest absolute value of a target; its square must still be a number in float32."""


@dataclass(frozen=True)
class NumberTargets:
    """What targets look like that are numbers: how many a sample has, and their regions.

    Parameters
    ----------
    edges : tuple of float
        Where one region ends and the next begins, ascending; none: one region of everything. A
        number that is equal to an edge lies above it.
    width : int
        Numbers to predict for each sample; only one of them can be divided into regions.

    Raises
    ------
    ValueError
        If the edges do not ascend, or there are edges and several numbers.

    Examples
    --------
    >>> targets = NumberTargets(edges=(30, 75))
    >>> targets.regions, targets.assign(np.array([12.0, 30.0, 125.0])).tolist()
    (3, [0, 1, 2])
    """

    edges: tuple[float, ...] = ()
    width: int = 1

    def __post_init__(self) -> None:
        check_range(self, "width", least=1, most=1 << 16)
        steps = np.diff(np.asarray(self.edges, dtype=np.float64))
        if not np.isfinite(self.edges).all() or not (steps > 0).all():
            raise ValueError(f"edges must be finite and ascend, got {list(self.edges)}")
        if self.edges and self.width > 1:
            raise ValueError("edges divide one number a sample: leave them out, or width at 1")

    @property
    def regions(self) -> int:
        """Y, the number of regions."""
        return len(self.edges) + 1

    @property
    def names(self) -> tuple[str, ...]:
        """What the regions are called.

        >>> NumberTargets((30, 75)).names
        ('below 30', '30 to 75', '75 and more')
        """
        if not self.edges:
            return ("all",)
        shown = [f"{edge:g}" for edge in self.edges]
        between = [f"{low} to {high}" for low, high in pairwise(shown)]
        return (f"below {shown[0]}", *between, f"{shown[-1]} and more")

    def assign(self, y: AnyArray) -> IntArray:
        """Give the region of each target, (n,)."""
        if not self.edges:
            return np.zeros(len(y), dtype=np.int64)
        flat = np.asarray(y, dtype=np.float64).reshape(len(y))
        return np.searchsorted(np.asarray(self.edges), flat, side="right").astype(np.int64)

    def valid(self, y: AnyArray) -> BoolArray:
        """Find the targets that are finite numbers, as many as they should be, (n,)."""
        if y.dtype.kind not in "fiu" or y.size != len(y) * self.width:
            return np.zeros(len(y), dtype=bool)
        rows = y.reshape(len(y), self.width)
        return np.asarray((np.abs(rows) <= LARGEST_TARGET).all(axis=1))

    def settled(self, y: Any) -> FloatArray:
        """Make what came the targets of a batch: float64, (n,), or (n, width) of several."""
        array = np.asarray(y, dtype=np.float64)
        return array.reshape(len(array)) if self.width == 1 else array.reshape(-1, self.width)


def quantile_edges(y: AnyArray, regions: int) -> tuple[float, ...]:
    """Find edges between regions of about equally many of these targets.

    Edges are settings: they are taken from past data, and fixed before a device divides by them.
    Equal edges count once, so that there may be fewer regions.

    >>> quantile_edges(np.array([1.0, 2.0, 3.0, 4.0, 125.0, 125.0, 125.0, 125.0]), 4)
    (2.75, 64.5, 125.0)
    """
    shares = np.arange(1, regions) / regions
    found = np.unique(np.quantile(np.asarray(y, dtype=np.float64), shares))
    return tuple(found[found > np.min(y)].tolist())
