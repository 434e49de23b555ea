"""FedAvg: the weighted mean of the local models (Eq. 2)."""

import numpy as np

from fedkeep.core.aggregation.base import RoundUpdates, UpdateRule, UpdateSum, aggregation
from fedkeep.core.types import FloatArray, Vector


@aggregation("fedavg")
class FedAvg(UpdateRule):
    """The mean of the local models by the weights of Eq. 12.

    FedProx (Li et al., 2020) is the same on the server; it differs on the device: `train.proximal`.

    References
    ----------
    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017;
    Eq. 2 of the ODE paper.
    """

    coordinatewise = True

    def step(self, updates: RoundUpdates) -> FloatArray:
        """Return the weighted mean of the updates."""
        mean: FloatArray = updates.weights @ updates.vectors
        return mean

    def apply(self, model: Vector, total: UpdateSum) -> Vector:
        """Return the same model from the weighted sum of the updates."""
        if not total.weight > 0:
            return model
        step = total.updates / total.weight
        return (model.astype(np.float64) + step).astype(np.float32)
