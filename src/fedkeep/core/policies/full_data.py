"""The ideal of unlimited storage (FD)."""

import numpy as np

from fedkeep.core.policy import SelectionPolicy, View, policy
from fedkeep.core.types import Batch, Scores


@policy("full-data")
class FullData(SelectionPolicy):
    """Keeps everything: the reference that no bounded store can have."""

    unbounded = True

    def score(self, batch: Batch, view: View) -> Scores:
        return np.zeros(len(batch))
