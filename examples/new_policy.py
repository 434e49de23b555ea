"""A custom policy: keep what the model is least sure of, but never the outright surprising.

Check it, then run it beside the built-in ones:

    fedkeep check examples/new_policy.py:Unsure
    python examples/new_policy.py
"""

from fedkeep.config.experiment import resolve
from fedkeep.core.percentiles import percentile
from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy, refuse_where
from fedkeep.core.types import Batch, Scores
from fedkeep.sim.engine import Simulator


@policy("unsure")
class Unsure(SelectionPolicy):
    """The loss, unless it is above a percentile of the latest losses."""

    window: int = 100
    at_most: float = 75.0

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        losses = view.measurements.losses()
        return refuse_where(losses > percentile(view.history(self.window), self.at_most), losses)


def final_accuracy(name: str) -> float:
    train = {"rounds": 100, "participation": 0.2, "learning_rate": 0.05}
    simulator = Simulator(
        resolve({"task": {"name": "demo"}, "policy": {"name": name}, "train": train})
    )
    return [record.evaluation.accuracy for record in simulator.run() if record.evaluation][-1]


if __name__ == "__main__":
    for name in ("fifo", "high-loss", "unsure"):
        print(f"{name:10} {final_accuracy(name):.1%}")
