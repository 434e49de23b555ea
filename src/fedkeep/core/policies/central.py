"""Centralised learning, the reference of Theorem 2 (CL)."""

import numpy as np

from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores


@policy("central")
class Central(SelectionPolicy):
    """Keeps everything of everyone in one place: what federated learning is measured against."""

    unbounded = True

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        return np.zeros(len(batch))
