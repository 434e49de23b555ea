"""ODE: keep what points where the whole fleet's data points (Eq. 6)."""

from typing import Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.policy import ScoringContext, SelectionPolicy, policy
from fedkeep.core.types import Batch, Scores

_LEAST = 1e-30
"""What a value that is not positive counts for in a draw."""
_SHARPEST = 10
"""Beyond this the odds of small values are no numbers any more, and all of them would be
refused."""


@policy("ode")
class Ode(SelectionPolicy):
    """The projection of a sample's gradient on the global gradient; random keys until there is one.

    `value` bounds what one sample can weigh: `projection` is the paper; `cosine` takes the
    gradient's length out; `clipped` shortens gradients longer than `clip` times the global one;
    `divergence` is <g, G> - ||g||^2 / 2, which by Lemma 1 (Eq. 5) is what minimises the distance of
    a device's gradient to the global one.

    `choice` says what to do with values: `greatest` keeps the largest, as the paper does. The
    largest of very many is an outlier, so `drawn` keeps a random sample in which the odds of an
    arrival are its value to the power of `sharpness` (0: all alike that are worth anything; the
    higher, the nearer to `greatest`).

    >>> from fedkeep.core.device import Device
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> learner = DenseLearner((2, 2))
    >>> device = Device(learner, Ode(), capacity=1, sample_shape=(2,), labels=2)
    >>> gradient = np.array([-1, 0, 0, 0, 0, 0], dtype=np.float32)
    >>> device.set_model(np.zeros(6, dtype=np.float32), gradient)
    >>> # For label 0 the gradient of x is (-x, x, -1, 1) / 2.
    >>> x = np.array([[1, 0], [4, 0], [0, 4]], dtype=np.float32)
    >>> outcome, _ = device.observe(Batch(x, np.zeros(3, dtype=np.int64), np.arange(3)), time=0.0)
    >>> outcome.scores.tolist(), device.store.stored().batch.ids.tolist()
    ([0.5, 2.0, 0.0], [1])
    """

    value: Literal["projection", "cosine", "clipped", "divergence"] = "projection"
    """What a sample is worth; `projection` is Eq. 6."""
    clip: float = 3.0
    choice: Literal["greatest", "drawn"] = "greatest"
    """Which of the values stay: the paper's `greatest`, or a draw by their odds."""
    sharpness: float = 0.5

    uses_global_gradient = True
    coordinated = True

    def __post_init__(self) -> None:
        check_range(self, "clip", above=0)
        check_range(self, "sharpness", least=0, most=_SHARPEST)

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Score each sample."""
        if view.global_gradient is None:
            return view.uniform
        values = view.measurements.projections(view.global_gradient)
        if self.value != "projection":
            norms, length = (
                view.measurements.norms(),
                float(np.linalg.norm(view.global_gradient.astype(np.float64))),
            )
            if self.value == "divergence":
                values = values - norms**2 / 2
            elif self.value == "cosine":
                values = values / np.maximum(norms * length, 1e-30)
            else:
                values = values * np.minimum(1.0, self.clip * length / np.maximum(norms, 1e-30))
        if self.choice == "greatest":
            return values
        # The largest of these keys are a weighted random sample of a stream (Efraimidis and
        # Spirakis, 2006).
        odds = np.maximum(values, _LEAST) ** self.sharpness
        return np.log(np.maximum(view.uniform, 1e-300)) / odds
