"""Regions: labels, and the whole as one."""

import numpy as np

from fedkeep.core.regions import LabelRegions, Regions
from fedkeep.core.types import Batch

BATCH = Batch(
    np.array([[[0.0, 1.0]], [[5.0, 5.0]], [[-4.0, -6.0]]]), np.array([2, 0, 1]), np.arange(3)
)


def assigned(regions: Regions) -> list[int]:
    found = regions.assign(BATCH, None)
    assert ((found >= 0) & (found < regions.count)).all()
    return [int(region) for region in found]


def test_labels_are_regions_by_default() -> None:
    assert assigned(LabelRegions(3)) == [2, 0, 1]


def test_everything_may_be_one_region() -> None:
    assert assigned(LabelRegions(1)) == [0, 0, 0]
