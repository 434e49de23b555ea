"""Local models to a global one (Eq. 2, step 8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError
from fedkeep.core.types import FloatArray, Report, Vector


@dataclass(frozen=True, eq=False)
class UpdateSum:
    """A round's updates as a server knows them that may see none of them: only what they add up to."""

    updates: FloatArray
    """The updates, each times its weight (`fednova`: its weight per local step)."""
    weight: float
    steps: float = 0.0
    """The local steps, each times its weight; of use to `fednova` only."""


@dataclass(frozen=True)
class Aggregation:
    """How a round's local models become the global model.

    `fedavg` is Eq. 2 with the weights of Eq. 12 (FedProx differs on the device only: `train.proximal`). `fednova`
    divides each update by its local steps before it averages them, so that devices that take more steps do not
    pull harder. `trimmed` drops at least the share `trim` of the largest and of the smallest values of each coordinate;
    `norm-bounded` scales updates longer than the round's median length down to that length.
    `robust` is Eq. 2 over updates that the server has tamed by what is usual in the fleet (`core.usual`).
    """

    name: Literal["fedavg", "fednova", "trimmed", "norm-bounded", "robust"] = "fedavg"
    """`fedavg` is Eq. 2; or `module:Class`, a subclass of Aggregation of your own."""
    trim: float = 0.1
    """The share of values that `trimmed` drops at either end of each coordinate."""

    def __post_init__(self) -> None:
        check_range(self, "trim", least=0, below=0.5)

    def aggregate(self, model: Vector, reports: Sequence[Report]) -> Vector:
        """The new global model; the old one if no report carries weight."""
        counted = [r for r in reports if r.weight > 0]
        if not counted:
            return model
        start = model.astype(np.float64)
        updates = np.stack([r.model.astype(np.float64) - start for r in counted])
        weights = np.array([r.weight for r in counted])
        weights = weights / weights.sum()
        step: FloatArray
        if self.name == "fednova":
            steps = np.array([r.steps for r in counted], dtype=np.float64)
            step = float(weights @ steps) * ((weights / np.maximum(steps, 1)) @ updates)
        elif self.name == "trimmed":
            cut = min(ceil(self.trim * len(updates)), (len(updates) - 1) // 2)
            order = np.argsort(updates, axis=0)[cut : len(updates) - cut]
            kept = weights[order]
            step = (np.take_along_axis(updates, order, axis=0) * kept).sum(axis=0) / kept.sum(
                axis=0
            )
        else:
            if self.name == "norm-bounded":
                norms = np.linalg.norm(updates, axis=1)
                updates = (
                    updates * np.minimum(1.0, np.median(norms) / np.maximum(norms, 1e-30))[:, None]
                )
            step = weights @ updates
        return (start + step).astype(np.float32)

    def apply(self, model: Vector, total: UpdateSum) -> Vector:
        """The same model from sums alone; robust means must see single updates and cannot do it."""
        if type(self) is not Aggregation or self.name not in ("fedavg", "fednova"):
            raise ConfigError(
                f'aggregation "{self.name}" must see single reports: it cannot work on their sum'
            )
        if not total.weight > 0:
            return model
        scale = total.steps / total.weight if self.name == "fednova" else 1.0
        return (model.astype(np.float64) + scale * total.updates / total.weight).astype(np.float32)
