"""Importance by gradient: keep what would move the model most (GN)."""

from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores


@policy("gradient-norm")
class GradientNorm(SelectionPolicy):
    """The length of the sample's gradient under the model last received."""

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        return view.measurements.norms()
