"""Importance by loss: keep what the model gets most wrong (HL)."""

from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores


@policy("high-loss")
class HighLoss(SelectionPolicy):
    """The sample's loss under the model last received."""

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        return view.measurements.losses()
