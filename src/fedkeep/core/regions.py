"""How the distribution is divided: store and plan speak of regions, and the label is the default one."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.ports import Measurements
from fedkeep.core.types import AnyArray, Batch, FloatArray, IntArray

Space: TypeAlias = Literal["features", "activations"]
"""Where clusters lie: in the inputs themselves, or in the inputs of the model's last layer."""


@dataclass(frozen=True)
class SingleRegion:
    """Everything is one region: for policies that run without coordination."""

    count: int = 1

    def assign(self, batch: Batch, measurements: Measurements | None) -> IntArray:  # noqa: ARG002 - nothing to measure
        return np.zeros(len(batch), dtype=np.int64)


@dataclass(frozen=True)
class LabelRegions:
    """A region for each label, as in the paper."""

    count: int

    def assign(self, batch: Batch, measurements: Measurements | None) -> IntArray:  # noqa: ARG002 - nothing to measure
        return batch.y


@dataclass(frozen=True, eq=False)
class CentroidRegions:
    """A region around each centroid, the nearest one counting: what devices agree on by federated clustering.

    In the space of activations a sample's region depends on the model: agree on new centroids, and plan anew, when
    the model has moved far.

    >>> regions = CentroidRegions(np.array([[0.0, 0.0], [4.0, 4.0]]))
    >>> batch = Batch(np.array([[1.0, 0.0], [3.0, 5.0]]), np.zeros(2, dtype=np.int64), np.arange(2))
    >>> regions.count, regions.assign(batch, None).tolist()
    (2, [0, 1])
    """

    centroids: FloatArray
    """(Y, d)."""
    space: Space = "features"

    def __post_init__(self) -> None:
        if self.centroids.ndim != 2 or not len(self.centroids) or not np.isfinite(self.centroids).all():
            raise ValueError("centroids must be finite numbers, one row for each of at least one region")

    @property
    def count(self) -> int:
        return len(self.centroids)

    def assign(self, batch: Batch, measurements: Measurements | None) -> IntArray:
        points = positions(batch, measurements, self.space)
        if points.shape[1] != self.centroids.shape[1]:
            raise ValueError(f"samples have {points.shape[1]} {self.space}, the centroids {self.centroids.shape[1]}")
        distances = (self.centroids**2).sum(axis=1) - 2 * points @ self.centroids.T
        return np.asarray(distances.argmin(axis=1))


Regions: TypeAlias = SingleRegion | LabelRegions | CentroidRegions
"""Divides samples among `count` regions, Y of them: `assign` gives that of each, (n,), in 0 .. count - 1."""


def positions(batch: Batch, measurements: Measurements | None, space: Space) -> AnyArray:
    """Where samples lie in a space, (n, d)."""
    if space == "activations" and measurements is None:
        raise ValueError("activations need a model; the device has none yet")
    points = batch.x if space == "features" or measurements is None else measurements.activations()
    return np.asarray(points, dtype=np.float64).reshape(len(batch), -1)


def regions_for(policy: SelectionPolicy, labels: int) -> Regions:
    """Labels, where slots are divided among them, by a plan or by the device; else one region for everything."""
    return LabelRegions(labels) if policy.coordinated or policy.balanced else SingleRegion()
