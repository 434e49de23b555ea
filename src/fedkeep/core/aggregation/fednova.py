"""FedNova: the mean of the updates per local step."""

import numpy as np

from fedkeep.core.aggregation.base import RoundUpdates, UpdateRule, UpdateSum, aggregation
from fedkeep.core.types import FloatArray, Vector


@aggregation("fednova")
class FedNova(UpdateRule):
    """The mean of the updates per local step, times the mean number of steps.

    Devices that take more local steps do not pull harder.

    References
    ----------
    Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, 2020.
    """

    coordinatewise = True
    per_step = True

    def step(self, updates: RoundUpdates) -> FloatArray:
        """Return the weighted mean of the updates per step, times the mean number of steps."""
        mean_steps = float(updates.weights @ updates.steps)
        per_step = (updates.weights / np.maximum(updates.steps, 1)) @ updates.vectors
        step: FloatArray = mean_steps * per_step
        return step

    def apply(self, model: Vector, total: UpdateSum) -> Vector:
        """Return the same model from the sums of the updates per step and of the steps."""
        if not total.weight > 0:
            return model
        mean_steps = total.steps / total.weight
        step = mean_steps * total.updates / total.weight
        return (model.astype(np.float64) + step).astype(np.float32)
