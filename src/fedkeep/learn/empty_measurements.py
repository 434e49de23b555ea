"""Measurements of no samples, which many torch layers would refuse to look at."""

from __future__ import annotations

import numpy as np

from fedkeep.core.ports import Measurements
from fedkeep.core.types import AnyArray, Scores, Vector


class EmptyMeasurements:
    """What any model sees in an empty batch; the mean gradient of nothing is zero."""

    def __init__(self, gradient_size: int) -> None:
        self._gradient_size = gradient_size

    def losses(self) -> Scores:
        return np.zeros(0)

    def projections(self, direction: Vector) -> Scores:  # noqa: ARG002
        return np.zeros(0)

    def inner(self, other: Measurements) -> Scores:  # noqa: ARG002
        return np.zeros(0)

    def norms(self) -> Scores:
        return np.zeros(0)

    def head_norms(self) -> Scores:
        return np.zeros(0)

    def mean_gradient(self) -> Vector:
        return np.zeros(self._gradient_size, dtype=np.float32)

    def weighted_gradient(self, weights: Scores) -> Vector:  # noqa: ARG002 - there is nothing to weigh
        return self.mean_gradient()

    def activations(self) -> AnyArray:
        return np.zeros((0, 0), dtype=np.float32)
