"""First in, first out: keep the latest samples (the rows called RS in the paper's tables)."""

import numpy as np

from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores


@policy("fifo")
class Fifo(SelectionPolicy):
    """The arrival number: the newest samples stay.

    >>> from fedkeep.core.device import Device
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> device = Device(DenseLearner((2, 3)), Fifo(), capacity=2, sample_shape=(2,), labels=3)
    >>> came = Batch(np.zeros((3, 2), dtype=np.float32), np.array([0, 2, 0]), np.array([7, 8, 9]))
    >>> _ = device.observe(came, time=0.0)
    >>> device.store.stored().batch.ids.tolist()
    [8, 9]
    """

    unbiased = True
    needs_model = False

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        return view.arrival.astype(np.float64)
