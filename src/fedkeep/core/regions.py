"""How the distribution is divided into regions, for store and plan; by label by default."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import Batch, IntArray


class Regions(Protocol):
    """Divides samples among `count` regions."""

    @property
    def count(self) -> int:
        """Y, the number of regions."""

    def assign(self, batch: Batch, measurements: PerSampleGradients | None) -> IntArray:
        """Give the region of each sample, (n,), in 0 .. count - 1."""


@dataclass(frozen=True)
class LabelRegions:
    """A region for each label, as in the paper; one for everything without coordination."""

    count: int

    def assign(self, batch: Batch, measurements: PerSampleGradients | None) -> IntArray:  # noqa: ARG002 - nothing to measure
        """Give the region of each sample, (n,)."""
        return batch.y if self.count > 1 else np.zeros(len(batch), dtype=np.int64)


@dataclass(frozen=True)
class TargetRegions:
    """A region for each interval of the number to predict."""

    targets: NumberTargets

    @property
    def count(self) -> int:
        """Y, the number of regions."""
        return self.targets.regions

    def assign(self, batch: Batch, measurements: PerSampleGradients | None) -> IntArray:  # noqa: ARG002 - nothing to measure
        """Give the region of each sample, (n,)."""
        return self.targets.assign(batch.y)


def region_term(regions: Regions) -> str:
    """Describe regions in a word that server and devices must have alike.

    >>> region_term(LabelRegions(10))
    '10'
    """
    return str(getattr(regions, "term", regions.count))


def regions_for(
    policy: SelectionPolicy, labels: int, targets: NumberTargets | None = None
) -> Regions:
    """Choose labels where a plan or the device divides slots among them; else one region.

    Of targets that are numbers, the intervals stand for labels.
    """
    if not (policy.coordinated or policy.balanced):
        return LabelRegions(1)
    return LabelRegions(labels) if targets is None else TargetRegions(targets)
