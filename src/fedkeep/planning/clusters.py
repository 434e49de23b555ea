"""Regions by clustering, agreed upon without samples leaving a device: centroids and counts travel instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.regions import CentroidRegions, Space
from fedkeep.core.types import AnyArray, FloatArray, IntArray
from fedkeep.planning.solvers import load


@dataclass(frozen=True, eq=False)
class Summary:
    """What a device tells of its samples: centroids, (k, d), and how many samples lie around each, (k,)."""

    centroids: FloatArray
    counts: IntArray


@dataclass(frozen=True)
class Clusters:
    """Federated clustering: each device summarises its samples, the server clusters the summaries by weight.

    >>> clusters = Clusters(regions=2, local=2)
    >>> told = [clusters.summarise(points) for points in (np.array([[0.0], [1.0]]), np.array([[9.0], [9.0], [0.5]]))]
    >>> sorted(clusters.agree(told).centroids.ravel().tolist())
    [0.5, 9.0]
    """

    regions: int
    method: Literal["k-means", "hierarchical"] = "k-means"
    space: Space = "features"
    local: int = 10
    """The clusters a device makes of its own samples; more tell the server more about them."""
    seed: int = 0

    def __post_init__(self) -> None:
        within(self, "regions", "local", least=1)

    def summarise(self, points: AnyArray) -> Summary:
        """On the device: the centroids of its samples, given as positions, (n, d), with n of at least 1."""
        return self._cluster(np.asarray(points, dtype=np.float64), np.ones(len(points)), self.local)

    def agree(self, summaries: Sequence[Summary]) -> CentroidRegions:
        """On the server: the regions that all devices will use, fewer than asked for if there is less to divide."""
        points = np.concatenate([summary.centroids for summary in summaries])
        weights = np.concatenate([summary.counts for summary in summaries]).astype(np.float64)
        return CentroidRegions(self._cluster(points, weights, self.regions).centroids, self.space)

    def _cluster(self, points: FloatArray, weights: FloatArray, count: int) -> Summary:
        count = min(count, len(np.unique(points, axis=0)))
        sklearn = load("sklearn.cluster", "clustered regions")
        if count == 1:
            members = np.zeros(len(points), dtype=np.int64)
        elif self.method == "k-means":
            model = sklearn.KMeans(count, n_init=4, random_state=self.seed)
            members = model.fit_predict(points, sample_weight=weights)
        else:
            members = sklearn.AgglomerativeClustering(count).fit_predict(points)
        mass = np.bincount(members, weights, minlength=count)
        centroids = np.zeros((count, points.shape[1]))
        np.add.at(centroids, members, points * weights[:, None])
        return Summary(centroids / mass[:, None], np.rint(mass).astype(np.int64))
