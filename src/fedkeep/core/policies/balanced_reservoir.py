"""A fresh draw: a random sample of what came since the device last took part, every label having its slots."""

from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores


@policy("balanced-reservoir")
class BalancedReservoir(SelectionPolicy):
    """Random keys, in a store whose labels have slots by the root of their share and whose used samples make way.

    Of N arrivals only about k ln(N / k) are ever written, where FIFO writes all of them.
    """

    balanced = True
    fair = True

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        return view.uniform
