"""A random sample of what came since the device last took part, with slots for every label."""

from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores


@policy("balanced-reservoir")
class BalancedReservoir(SelectionPolicy):
    """Random keys; every label has slots by the root of its share.

    Of N arrivals only about k ln(N / k) are ever written, where FIFO writes all of them.
    """

    balanced = True
    unbiased = True

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        return view.uniform
