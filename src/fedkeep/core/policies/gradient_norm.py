"""Importance by gradient: keep what would move the model most (GN)."""

from fedkeep.core.policy import SelectionPolicy, View, policy
from fedkeep.core.types import Batch, Scores


@policy("gradient-norm")
class GradientNorm(SelectionPolicy):
    """The length of the sample's gradient under the model last received."""

    def score(self, batch: Batch, view: View) -> Scores:
        return view.measurements.norms()
