"""Regions by clustering, agreed upon without samples leaving a device: centroids and counts travel instead.

`regions = { name = "experiments/lab/clusters.py:Clusters", count = 4 }`, as in the journal version.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from sklearn.cluster import AgglomerativeClustering, KMeans

from fedkeep.core.bounds import check_range
from fedkeep.core.protocols import GradientProbe, PerSampleGradients
from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, Batch, FloatArray, IntArray
from fedkeep.data import Federation

_SUMMARISED = 200
"""Samples of a device, and devices of a fleet, that agreeing on clusters takes into account."""
Summary: TypeAlias = tuple[FloatArray, IntArray]
"""What a device tells of its samples: centroids, (k, d), and how many samples lie around each, (k,)."""


@dataclass(frozen=True)
class Clusters:
    """A region around each centroid: each device summarises its samples, the server clusters the summaries by weight.

    In the space of activations a sample's region depends on the model: agree on new centroids, and plan anew, when
    the model has moved far.

    >>> clusters = Clusters(count=2, local=2)
    >>> told = [clusters.summarise(points) for points in (np.array([[0.0], [1.0]]), np.array([[9.0], [9.0], [0.5]]))]
    >>> agreed = clusters.merge(told)
    >>> sorted(agreed.centroids)
    [[0.5], [9.0]]
    """

    count: int = 10
    method: Literal["k-means", "hierarchical"] = "k-means"
    space: Literal["features", "activations"] = "features"
    """Where clusters lie: in the inputs, or in the inputs of the model's last layer."""
    local: int = 10
    """The clusters a device makes of its own samples; more tell the server more about them."""
    centroids: list[list[float]] | None = None
    """Left out: the devices agree on them when a run begins."""

    def __post_init__(self) -> None:
        check_range(self, "count", "local", least=1)
        if self.centroids is not None and not (
            self.centroids and np.isfinite(self.centroids).all()
        ):
            raise ValueError(
                "centroids must be finite numbers, one row for each of at least one region"
            )

    def agree(self, data: Federation, probe: GradientProbe, seed: int) -> "Clusters":
        """The regions that all devices of a simulated fleet will use."""
        devices = np.sort(
            generator(seed, "clusters").permutation(data.devices)[:_SUMMARISED]
        ).tolist()
        batches = [data.take(data.train.of(device)[:_SUMMARISED]) for device in devices]
        return self.merge(
            [self.summarise(self._positions(b, probe.measure(b)), seed) for b in batches], seed
        )

    def assign(self, batch: Batch, measurements: PerSampleGradients | None) -> IntArray:
        """The nearest centroid of each sample, (n,)."""
        points, centroids = self._positions(batch, measurements), np.array(self.centroids or [[]])
        if points.shape[1] != centroids.shape[1]:
            raise ValueError(
                f"samples have {points.shape[1]} {self.space}, the centroids {centroids.shape[1]}"
            )
        distances = (centroids**2).sum(axis=1) - 2 * points @ centroids.T
        return np.asarray(distances.argmin(axis=1))

    def summarise(self, points: AnyArray, seed: int = 0) -> Summary:
        """On the device: the centroids of its samples, given as positions, (n, d), with n of at least 1."""
        return self._cluster(
            np.asarray(points, dtype=np.float64), np.ones(len(points)), self.local, seed
        )

    def merge(self, summaries: Sequence[Summary], seed: int = 0) -> "Clusters":
        """On the server: the regions that all devices will use, fewer than asked for if there is less to divide."""
        points, counts = map(np.concatenate, zip(*summaries, strict=True))
        centroids, _ = self._cluster(points, counts.astype(np.float64), self.count, seed)
        return replace(self, count=len(centroids), centroids=centroids.tolist())

    def _positions(self, batch: Batch, measurements: PerSampleGradients | None) -> AnyArray:
        """Where samples lie in the space, (n, d)."""
        if self.space == "activations" and measurements is None:
            raise ValueError("activations need a model; the device has none yet")
        points = (
            batch.x
            if self.space == "features" or measurements is None
            else measurements.activations()
        )
        return np.asarray(points, dtype=np.float64).reshape(len(batch), -1)

    def _cluster(self, points: FloatArray, weights: FloatArray, count: int, seed: int) -> Summary:
        count = min(count, len(np.unique(points, axis=0)))
        if count == 1:
            members = np.zeros(len(points), dtype=np.int64)
        elif self.method == "k-means":
            members = KMeans(count, n_init=4, random_state=seed).fit_predict(
                points, sample_weight=weights
            )
        else:
            members = AgglomerativeClustering(count).fit_predict(points)
        mass = np.bincount(members, weights, minlength=count)
        centroids = np.zeros((count, points.shape[1]))
        np.add.at(centroids, members, points * weights[:, None])
        return centroids / mass[:, None], np.rint(mass).astype(np.int64)
