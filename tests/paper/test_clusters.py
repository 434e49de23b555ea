"""Regions agreed on by federated clustering, and coordination in them."""

from typing import cast

import numpy as np
import pytest

from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.types import AnyArray, Batch, FloatArray

pytest.importorskip("sklearn")
from fedkeep.solvers.clusters import Clusters, Hierarchical, KMeans

CENTRES = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
METHODS: list[type[Clusters]] = [KMeans, Hierarchical]


def devices() -> list[FloatArray]:
    """Three devices, each of which sees two of three clusters.

    One ten times as often as the other.
    """
    rng = np.random.default_rng(0)
    return [
        np.concatenate(
            [
                CENTRES[c] + rng.normal(0, 0.5, (100, 2)),
                CENTRES[(c + 1) % 3] + rng.normal(0, 0.5, (10, 2)),
            ]
        )
        for c in range(3)
    ]


def as_batch(points: AnyArray) -> Batch:
    return Batch(points, np.zeros(len(points), dtype=np.int64), np.arange(len(points)))


def agree(method: type[Clusters]) -> Clusters:
    clusters = method(3, local=4)
    return clusters.merge([clusters.summarise(points) for points in devices()])


@pytest.mark.parametrize("method", METHODS)
def test_devices_agree_on_clusters_that_none_of_them_sees_whole(method: type[Clusters]) -> None:
    found = np.array(agree(method).centroids)
    nearest = np.linalg.norm(found[:, None] - CENTRES, axis=2)
    assert sorted(nearest.argmin(axis=1).tolist()) == [0, 1, 2]
    assert nearest.min(axis=1).max() < 0.3


@pytest.mark.parametrize("method", METHODS)
def test_coordination_works_in_clusters(method: type[Clusters]) -> None:
    regions = agree(method)
    velocities = [
        np.bincount(regions.assign(as_batch(p), None), minlength=regions.count) for p in devices()
    ]
    plan = Greedy(1, 1).plan(FleetProfiles.numbered([5, 5, 5], np.array(velocities)))
    assert plan.holders.tolist() == [1, 1, 1]
    assert plan.quotas.argmax(axis=1).tolist() == np.argmax(velocities, axis=1).tolist()
    assert plan.label_weights == pytest.approx([1.0, 1.0, 1.0])


def test_many_samples_outweigh_few() -> None:
    """Two summaries of one region: the centroid lies where the samples are."""
    many, few = (np.array([[0.0]]), np.array([99])), (np.array([[100.0]]), np.array([1]))
    for method in METHODS:
        assert method(1).merge([many, few]).centroids == [[1.0]]


def test_fewer_distinct_points_than_regions_give_fewer_regions() -> None:
    clusters = KMeans(5, local=3)
    summary = clusters.summarise(np.array([[1.0], [1.0], [2.0]]))
    assert summary[1].sum() == 3
    assert clusters.merge([summary]).count == 2


def test_the_same_seed_gives_the_same_regions() -> None:
    assert agree(KMeans) == agree(KMeans)


def test_unsound_options_are_refused() -> None:
    with pytest.raises(ValueError, match="count must be 1 or more, got 0"):
        KMeans(0)
    for unfit in ([[np.nan, 1.0]], []):
        with pytest.raises(ValueError, match="finite numbers"):
            KMeans(centroids=unfit)


class Activations:
    """Measurements of a model whose last layer sees the samples mirrored."""

    def activations(self) -> AnyArray:
        return -SAMPLES.x.reshape(3, -1)


SAMPLES = Batch(
    np.array([[[0.0, 1.0]], [[5.0, 5.0]], [[-4.0, -6.0]]]), np.array([2, 0, 1]), np.arange(3)
)
CENTROIDS = [[0.0, 0.0], [5.0, 5.0], [-5.0, -5.0]]


def test_the_nearest_centroid_counts() -> None:
    measured = cast(PerSampleGradients, Activations())
    assert KMeans(3, centroids=CENTROIDS).assign(SAMPLES, measured).tolist() == [0, 1, 2]
    assert KMeans(3, space="activations", centroids=CENTROIDS).assign(
        SAMPLES, measured
    ).tolist() == [0, 2, 1]


def test_samples_that_do_not_lie_where_the_centroids_do_are_refused() -> None:
    with pytest.raises(ValueError, match="samples have 2 features, the centroids 3"):
        KMeans(1, centroids=[[1.0, 1.0, 1.0]]).assign(SAMPLES, None)
    with pytest.raises(ValueError, match="activations need a model"):
        KMeans(3, space="activations", centroids=CENTROIDS).assign(SAMPLES, None)
