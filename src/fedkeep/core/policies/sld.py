"""Sample-level data selection on a stream: large gradients, without the largest half (SLD)."""

from fedkeep.core.percentiles import percentile
from fedkeep.core.policy import FilteringPolicy, ScoringContext, policy, refuse_where
from fedkeep.core.types import Batch, Scores


@policy("sld")
class Sld(FilteringPolicy):
    """The gradient's norm, with a filter against noise.

    `paper`: refuses a norm above the median of the latest `window` norms. `authors`: takes the norm
    over the last layer only and refuses it above 1.2 times the mean of all norms seen, save for a
    chance of 0.2 or while at most one sample is stored; when a new model arrives, what is stored
    must pass the same test.
    """

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        if self.variant == "authors":
            norms = view.measurements.head_norms()
            passes = (
                (norms <= 1.2 * view.running_mean("head_norms"))
                | (view.uniform < 0.2)
                | view.nearly_empty(1)
            )
            return refuse_where(~passes, norms)
        norms = view.measurements.norms()
        if view.previous is not None:
            return norms
        return refuse_where(norms > percentile(view.history(self.window, "norms"), 50), norms)
