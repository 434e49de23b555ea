"""Targets that are numbers to predict, beside labels: how they look, and how they are divided.

A batch's `y` is labels, int64, or such targets, float64; what is made of them is decided here and
in the loss alone. Everything else of the core takes regions, which are whole numbers either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.types import AnyArray, BoolArray, FloatArray, IntArray

LARGEST_TARGET = 1e12
"""The largest absolute value of a target; its square must still be a number in float32."""

WORST_R2 = -1.0
"""Models that are worse count as this: a single one that diverged would decide any mean."""


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


def targets_of(
    kind: str, labels: int | None, edges: tuple[float, ...], width: int
) -> tuple[int, NumberTargets | None]:
    """Read what a configuration says of targets.

    Parameters
    ----------
    kind : str
        `class` or `number`.
    labels : int or None
        The number of labels, where it is given.
    edges, width
        As in `NumberTargets`.

    Returns
    -------
    tuple
        The number of labels, or of intervals; and what targets look like that are numbers.

    Raises
    ------
    ValueError
        If options are missing, or about the other kind of targets.

    Examples
    --------
    >>> targets_of("class", 10, (), 1), targets_of("number", None, (5.0,), 1)
    ((10, None), (2, NumberTargets(edges=(5.0,), width=1)))
    """
    if kind == "number":
        if labels is not None:
            raise ValueError("labels are of classes, and targets are numbers: leave labels out")
        targets = NumberTargets(edges, width)
        return targets.regions, targets
    if kind != "class":
        raise ValueError(f'targets must be "class" or "number", got {kind!r}')
    if edges or width != 1:
        given = "edges" if edges else "width"
        raise ValueError(f'{given} is for numbers to predict: set targets = "number", too')
    if labels is None:
        raise ValueError('labels is missing: give their number, or targets = "number"')
    return labels, None


def residuals(predicted: AnyArray, y: AnyArray) -> FloatArray:
    """Compute prediction less target; one that is no number is very far off."""
    off = np.asarray(predicted - y, dtype=np.float64)
    far = np.nan_to_num(off, nan=LARGEST_TARGET, posinf=LARGEST_TARGET, neginf=-LARGEST_TARGET)
    return np.clip(far, -LARGEST_TARGET, LARGEST_TARGET)


def error_sums(predicted: AnyArray, y: AnyArray) -> FloatArray:
    """Sum what scores of numbers follow from, so that those of several devices can be added.

    Returns
    -------
    FloatArray
        Squared errors, absolute errors, targets and squared targets, (4,); of several targets a
        sample, their means.
    """
    off, exact = (
        array.reshape(len(y), -1) for array in (residuals(predicted, y), np.asarray(y, np.float64))
    )
    columns = (off**2, np.abs(off), exact, exact**2)
    return np.array([column.mean(axis=1).sum() for column in columns])


def scores_of_sums(samples: float, sums: Sequence[float]) -> dict[str, float]:
    """Compute RMSE, MAE and R2 from what `error_sums` added up over so many samples.

    >>> y = np.array([1.0, 2.0, 3.0, 4.0])
    >>> scores = scores_of_sums(4, error_sums(np.array([1.0, 2.0, 3.0, 6.0]), y))
    >>> scores["rmse"], scores["mae"], round(scores["r2"], 3)
    (1.0, 0.5, 0.2)
    """
    squared, absolute, mean, square = (float(total) / samples for total in sums)
    variance = square - mean**2
    # What is left of rounding where all targets are one number is no variance.
    if variance <= 1e-12 * square:
        r2 = 1.0 if squared == 0 else WORST_R2
    else:
        r2 = max(WORST_R2, 1 - squared / variance)
    return {"rmse": squared**0.5, "mae": absolute, "r2": r2}


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
