"""An even spread over time: as many samples of each stretch of the stream."""

import numpy as np

from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores


@policy("time-stratified")
class TimeStratified(SelectionPolicy):
    """Arrivals by how often their number can be halved: every second, fourth, eighth ... stays.

    So what is kept is spread evenly over all that came, however long that was: systematic sampling
    whose step doubles as the store fills, with a random choice among those of the last step. It
    says nothing of streams that repeat themselves with a period of a power of two.

    >>> from fedkeep.core.device import Device
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> device = Device(
    ...     DenseLearner((2, 2)), TimeStratified(), capacity=4, sample_shape=(2,), labels=2
    ... )
    >>> came = Batch(np.zeros((64, 2), dtype=np.float32), np.zeros(64, dtype=int), np.arange(64))
    >>> _ = device.observe(came, time=0.0)
    >>> device.store.stored().batch.ids.tolist()
    [15, 31, 47, 63]
    """

    needs_model = False

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        number = view.arrival + 1
        halvings = np.log2((number & -number).astype(np.float64))
        return np.asarray(halvings + view.uniform)
