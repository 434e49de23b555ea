"""ODE: keep what points where the whole fleet's data points (Eq. 6)."""

from typing import Literal

import numpy as np

from fedkeep.core.policy import SelectionPolicy, View, policy
from fedkeep.core.types import Batch, Scores


@policy("ode")
class Ode(SelectionPolicy):
    """The projection of a sample's gradient on the global gradient; random keys until there is one.

    `value` bounds what one sample can weigh: `projection` is the paper; `cosine` takes the gradient's length out;
    `clipped` shortens gradients longer than `clip` times the global one; `divergence` is <g, G> - ||g||^2 / 2, which
    by Lemma 1 (Eq. 5) is what minimises the distance of a device's gradient to the global one.
    """

    value: Literal["projection", "cosine", "clipped", "divergence"] = "projection"
    clip: float = 3.0

    uses_direction = True
    coordinated = True

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"clip must be above 0, got {self.clip}")

    def score(self, batch: Batch, view: View) -> Scores:
        if view.direction is None:
            return view.uniform
        projections = view.measurements.projections(view.direction)
        if self.value == "projection":
            return projections
        norms = view.measurements.norms()
        length = float(np.linalg.norm(view.direction.astype(np.float64)))
        if self.value == "divergence":
            return projections - norms**2 / 2
        if self.value == "cosine":
            return projections / np.maximum(norms * length, 1e-30)
        return projections * np.minimum(1.0, self.clip * length / np.maximum(norms, 1e-30))
