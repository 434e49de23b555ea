"""First in, first out: keep the latest samples (the rows called RS in the paper's tables)."""

import numpy as np

from fedkeep.core.policy import SelectionPolicy, View, policy
from fedkeep.core.types import Batch, Scores


@policy("fifo")
class Fifo(SelectionPolicy):
    """The arrival number: the newest samples stay (`make_device` shows it at work)."""

    fair = True

    def score(self, batch: Batch, view: View) -> Scores:
        return view.arrival.astype(np.float64)
