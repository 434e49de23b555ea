"""The mean of updates clipped to the round's median length."""

import numpy as np

from fedkeep.core.aggregation.base import RoundUpdates, UpdateRule, aggregation
from fedkeep.core.types import FloatArray


@aggregation("norm-bounded")
class NormBounded(UpdateRule):
    """The weighted mean of the updates, the longer ones clipped to the round's median length.

    It bounds how far a Byzantine device moves the model, not into which direction.

    References
    ----------
    Sun et al., Can You Really Backdoor Federated Learning?, 2019.
    """

    def step(self, updates: RoundUpdates) -> FloatArray:
        """Return the weighted mean of the clipped updates."""
        norms = np.linalg.norm(updates.vectors, axis=1)
        factors = np.minimum(1.0, np.median(norms) / np.maximum(norms, 1e-30))
        mean: FloatArray = updates.weights @ (updates.vectors * factors[:, None])
        return mean
