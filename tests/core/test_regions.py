"""Regions: labels, centroids in either space, and the whole as one."""

from typing import cast

import numpy as np
import pytest

from fedkeep.core.ports import Measurements
from fedkeep.core.regions import CentroidRegions, LabelRegions, Regions, SingleRegion
from fedkeep.core.types import AnyArray, Batch


class Activations:
    """Measurements of a model whose last layer sees the samples mirrored."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def activations(self) -> AnyArray:
        return -self._batch.x.reshape(len(self._batch), -1)


BATCH = Batch(np.array([[[0.0, 1.0]], [[5.0, 5.0]], [[-4.0, -6.0]]]), np.array([2, 0, 1]), np.arange(3))
CENTROIDS = np.array([[0.0, 0.0], [5.0, 5.0], [-5.0, -5.0]])


def assigned(regions: Regions) -> list[int]:
    found = regions.assign(BATCH, cast(Measurements, Activations(BATCH)))
    assert ((found >= 0) & (found < regions.count)).all()
    return [int(region) for region in found]


def test_labels_are_regions_by_default() -> None:
    assert assigned(LabelRegions(3)) == [2, 0, 1]


def test_everything_may_be_one_region() -> None:
    assert (assigned(SingleRegion()), SingleRegion().count) == ([0, 0, 0], 1)


def test_the_nearest_centroid_counts() -> None:
    assert assigned(CentroidRegions(CENTROIDS)) == [0, 1, 2]
    assert assigned(CentroidRegions(CENTROIDS, "activations")) == [0, 2, 1]


def test_centroids_that_cannot_serve_are_refused() -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        CentroidRegions(np.array([[np.nan, 1.0]]))
    with pytest.raises(ValueError, match="finite numbers"):
        CentroidRegions(np.empty((0, 2)))
    with pytest.raises(ValueError, match="samples have 2 features, the centroids 3"):
        CentroidRegions(np.ones((1, 3))).assign(BATCH, None)
    with pytest.raises(ValueError, match="activations need a model"):
        CentroidRegions(CENTROIDS, "activations").assign(BATCH, None)
