"""Random sampling: every arrival is as likely to be kept as any other."""

from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores


@policy("reservoir")
class Reservoir(SelectionPolicy):
    """A uniform sample of the stream: independent random keys, the largest stay.

    With `restart` the sampling begins anew after each participation, what is stored counting as the
    first arrivals: so the authors run it, and it favours recent samples.
    """

    unbiased = True
    restart: bool = False
    """Whether the stream counts from the beginning again at each participation, as in the authors'
    code."""

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        if view.previous is None or self.restart:
            return view.uniform
        return view.previous
