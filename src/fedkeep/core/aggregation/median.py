"""The coordinate-wise median."""

import numpy as np

from fedkeep.core.aggregation.base import RoundUpdates, UpdateRule, aggregation
from fedkeep.core.types import FloatArray


@aggregation("median")
class Median(UpdateRule):
    """The median of each coordinate, whatever the reports weigh.

    It survives any minority of Byzantine devices, but averages honest ones less: where devices hold
    few labels each, it learns more slowly than a mean.

    References
    ----------
    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, 2018.
    """

    coordinatewise = True

    def step(self, updates: RoundUpdates) -> FloatArray:
        """Return the median of each coordinate."""
        return np.asarray(np.median(updates.vectors, axis=0), dtype=np.float64)
