"""Weighted means by sums alone: as members and books of secure sums make them."""

import numpy as np

from fedkeep.core.types import AnyArray, FloatArray


def weighted(values: AnyArray, weight: float) -> FloatArray:
    """The values times their weight, then the weight: sums of these tell the weighted mean."""
    return np.append(np.asarray(values, dtype=np.float64) * weight, weight)


def weighted_mean(total: FloatArray) -> FloatArray:
    return total[:-1] / total[-1]
