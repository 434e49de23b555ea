"""The coordinate-wise trimmed mean."""

from math import ceil

import numpy as np

from fedkeep.core.aggregation.base import RoundUpdates, UpdateRule, aggregation
from fedkeep.core.bounds import check_range
from fedkeep.core.types import FloatArray


@aggregation("trimmed")
class Trimmed(UpdateRule):
    """The weighted mean of each coordinate without its largest and its smallest values.

    Rounded up, so that also among few reports at least one value goes at either end. Which of
    several equal values goes, and with it its weight, is left to their order: a server's is that
    of the devices' ids.

    References
    ----------
    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, 2018.
    """

    coordinatewise = True
    trim: float = 0.1
    """The share of values left out at either end of each coordinate."""

    def __post_init__(self) -> None:
        check_range(self, "trim", least=0, below=0.5)

    def step(self, updates: RoundUpdates) -> FloatArray:
        """Return the trimmed mean of each coordinate."""
        count = len(updates.vectors)
        cut = min(ceil(self.trim * count), (count - 1) // 2)
        order = np.argsort(updates.vectors, axis=0)[cut : count - cut]
        values = np.take_along_axis(updates.vectors, order, axis=0)
        weights = updates.weights[order]
        total = weights.sum(axis=0)
        # Where what is left weighs nothing, all of it counts alike.
        mean: FloatArray = values.mean(axis=0)
        np.divide((values * weights).sum(axis=0), total, out=mean, where=total > 0)
        return mean
