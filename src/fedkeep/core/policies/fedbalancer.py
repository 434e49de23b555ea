"""FedBalancer, made to fit a stream: high losses, without the suspiciously high ones (FB)."""

from fedkeep.core.percentiles import percentile
from fedkeep.core.policy import FilteringPolicy, ScoringContext, policy, refuse_where
from fedkeep.core.types import Batch, Scores


@policy("fedbalancer")
class FedBalancer(FilteringPolicy):
    """The loss, with a filter against noise.

    `paper`: refuses a loss above the 90th percentile of the latest `window` losses. `authors`:
    refuses a loss above 0.9 of the largest ever seen, save for a chance of 0.3 or while at most two
    samples are stored; when a new model arrives, what is stored must pass the same test.
    """

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        losses = view.measurements.losses()
        if self.variant == "authors":
            passes = (
                (losses <= 0.9 * view.running_max("losses"))
                | (view.uniform < 0.3)
                | view.nearly_empty(2)
            )
            return refuse_where(~passes, losses)
        if view.previous is not None:
            return losses
        return refuse_where(losses > percentile(view.history(self.window, "losses"), 90), losses)
