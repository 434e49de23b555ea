"""Regions by clustering: `regions.name = "k-means"` or `"hierarchical"`.

The devices agree on clusters without a sample leaving any of them: centroids and counts travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError, optional_import
from fedkeep.core.protocols import GradientProbe, PerSampleGradients
from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, Batch, FloatArray, IntArray

if TYPE_CHECKING:
    from fedkeep.data import Federation

_SUMMARISED = 200
"""Samples of a device, and devices of a fleet, that agreeing on clusters takes into account."""
Summary: TypeAlias = tuple[FloatArray, IntArray]
"""What a device reports of its samples: centroids, (k, d), and the samples around each, (k,)."""


@dataclass(frozen=True)
class Clusters:
    """A region around each centroid; a subclass says how centroids are found.

    Each device summarises its samples, the server clusters the summaries by weight. In the space of
    activations a sample's region depends on the model: agree on new centroids, and plan anew, when
    the model has moved far.

    References
    ----------
    Gong et al., To Store or Not?, WWW 2023, section 3.3, footnote on other ways to divide; the
    journal version, IEEE/ACM ToN 32(4), 2024.

    Examples
    --------
    >>> clusters = KMeans(count=2, local=2)
    >>> points = (np.array([[0.0], [1.0]]), np.array([[9.0], [9.0], [0.5]]))
    >>> agreed = clusters.merge([clusters.summarise(own) for own in points])
    >>> sorted(agreed.centroids)
    [[0.5], [9.0]]
    """

    count: int = 10
    """How many regions there are."""
    space: Literal["features", "activations"] = "features"
    """Where clusters lie: in the inputs, or in the inputs of the model's last layer."""
    local: int = 10
    """The clusters a device makes of its samples; more of them reveal more to the server."""
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

    @property
    def term(self) -> str:
        """The number of regions and a digest of the centroids: alike on server and devices."""
        rounded = np.array(self.centroids or [[]], dtype=np.float64).round(9)
        digest = blake2b(rounded.tobytes(), digest_size=6).hexdigest()
        return f"{self.count} around centroids {digest}"

    def deployed(self, features: int) -> Self:
        """Return the regions of a fleet, whose tables bring the centroids.

        Parameters
        ----------
        features : int
            The numbers in a sample.

        Raises
        ------
        ConfigError
            If there are no centroids, or none for samples of this form.
        """
        if self.space != "features":
            raise ConfigError(
                "'regions.space' must be \"features\" in a fleet: activations move with the model"
            )
        if self.centroids is None:
            raise ConfigError(
                "'regions.centroids' is missing: a fleet's devices use the same ones, which "
                "summarise and merge of the class find (docs/flower.md)"
            )
        widths = {len(centroid) for centroid in self.centroids}
        if widths != {features}:
            raise ConfigError(
                f"'regions.centroids' must have {features} numbers each, as many as a sample, "
                f"got {', '.join(map(str, sorted(widths)))}"
            )
        return replace(self, count=len(self.centroids))

    def agree(self, data: "Federation", probe: GradientProbe, seed: int) -> Self:
        """Find the regions that all devices of a simulated fleet will use.

        Parameters
        ----------
        data : Federation
            The fleet's samples; each device looks at its own alone.
        probe : GradientProbe
            The first model, for clusters in the space of activations.
        seed : int
            What the clustering follows from.

        Returns
        -------
        Clusters
            These options with centroids.
        """
        if self.centroids is not None:
            return replace(self, count=len(self.centroids))
        chosen = generator(seed, "clusters").permutation(data.devices)[:_SUMMARISED]
        batches = [
            data.take(data.train.of(device)[:_SUMMARISED]) for device in np.sort(chosen).tolist()
        ]
        return self.merge(
            [self.summarise(self._positions(b, probe.measure(b)), seed) for b in batches], seed
        )

    def assign(self, batch: Batch, measurements: PerSampleGradients | None) -> IntArray:
        """Find the nearest centroid of each sample.

        Parameters
        ----------
        batch : Batch
            n samples.
        measurements : PerSampleGradients or None
            The batch under the device's model, for the space of activations.

        Returns
        -------
        ndarray of int, shape (n,)
            The region of each.
        """
        points, centroids = self._positions(batch, measurements), np.array(self.centroids or [[]])
        if points.shape[1] != centroids.shape[1]:
            raise ValueError(
                f"samples have {points.shape[1]} {self.space}, the centroids {centroids.shape[1]}"
            )
        distances = (centroids**2).sum(axis=1) - 2 * points @ centroids.T
        return np.asarray(distances.argmin(axis=1))

    def summarise(self, points: AnyArray, seed: int = 0) -> Summary:
        """Summarise a device's samples, on the device.

        Parameters
        ----------
        points : ndarray, shape (n, d)
            Where its samples lie, n of at least 1.
        seed : int
            What the clustering follows from.

        Returns
        -------
        tuple of ndarray
            The centroids and how many samples lie around each.
        """
        return self._cluster(
            np.asarray(points, dtype=np.float64), np.ones(len(points)), self.local, seed
        )

    def merge(self, summaries: Sequence[Summary], seed: int = 0) -> Self:
        """Cluster the devices' summaries, on the server.

        Parameters
        ----------
        summaries : sequence of Summary
            One from each device.
        seed : int
            What the clustering follows from.

        Returns
        -------
        Clusters
            The regions that all devices will use, fewer than asked for if there is less to divide.
        """
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
        members: AnyArray = np.zeros(len(points), dtype=np.int64)
        if count > 1:
            members = self._members(points, weights, count, seed)
        mass = np.bincount(members, weights, minlength=count)
        centroids = np.zeros((count, points.shape[1]))
        np.add.at(centroids, members, points * weights[:, None])
        return centroids / mass[:, None], np.rint(mass).astype(np.int64)

    def _members(self, points: FloatArray, weights: FloatArray, count: int, seed: int) -> AnyArray:
        """Return the cluster of each point, (n,), of `count` clusters, two at least."""
        raise NotImplementedError


@dataclass(frozen=True)
class KMeans(Clusters):
    """Clusters of the smallest squared distances: `regions.name = "k-means"`."""

    name: ClassVar[str] = "k-means"

    def _members(self, points: FloatArray, weights: FloatArray, count: int, seed: int) -> AnyArray:
        clustering = _scikit_learn(self.name).KMeans(count, n_init=4, random_state=seed)
        return np.asarray(clustering.fit_predict(points, sample_weight=weights))


@dataclass(frozen=True)
class Hierarchical(Clusters):
    """Clusters merged from single points (Ward): `regions.name = "hierarchical"`."""

    name: ClassVar[str] = "hierarchical"

    def _members(
        self,
        points: FloatArray,
        weights: FloatArray,  # noqa: ARG002 - Ward's method knows none
        count: int,
        seed: int,  # noqa: ARG002 - nothing is drawn
    ) -> AnyArray:
        clustering = _scikit_learn(self.name).AgglomerativeClustering(count)
        return np.asarray(clustering.fit_predict(points))


def _scikit_learn(feature: str) -> Any:
    with optional_import(f'regions "{feature}"', "plan"):
        import sklearn.cluster
    return sklearn.cluster
