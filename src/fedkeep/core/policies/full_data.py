"""The ideal of unlimited storage (FD)."""

import numpy as np

from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores


@policy("full-data")
class FullData(SelectionPolicy):
    """Keeps everything: the reference that no bounded store can have."""

    unbiased = True
    unbounded = True
    so_far: bool = False
    """Only what has arrived so far, as a real device with unlimited storage would have; else all it
    will ever see."""

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        return np.zeros(len(batch))
