"""What an order must be before a device follows it: a server's word is input too.

The bounds stand here and nowhere else, for agents, Flower nodes and Keepers alike. They are wide: no sound schedule
comes near them, and no order within them can harm more than the round it belongs to.
"""

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.errors import RefusedError
from fedkeep.core.types import TrainOrder, Vector

LAST_ROUND = 10_000_000
MOST_EPOCHS = 1_000
FASTEST_RATE = 100.0
LARGEST_PARAMETER = 1e6
"""By size, of a model or a direction."""
_BOUNDS: dict[str, dict[str, float]] = {
    "round": {"least": 0, "most": LAST_ROUND},
    "accepted_round": {"least": -1, "most": LAST_ROUND},
    "learning_rate": {"above": 0, "most": FASTEST_RATE},
    "proximal": {"least": 0, "most": 1e6},
    "epochs": {"least": 1, "most": MOST_EPOCHS},
    "batch_size": {"least": 1, "most": 1_000_000},
}
"""None, where it may stand, stands for "none"."""
_WHOLE = {"round", "accepted_round", "epochs", "batch_size"}


def screen_order(order: TrainOrder, size: int, gradient_size: int, regions: int, capacity: int) -> None:
    """Raises where an order does not fit a device of these sizes, or is out of bounds; nothing is stored before."""
    for name, limits in _BOUNDS.items():
        part = order if hasattr(order, name) else order.local
        value = getattr(part, name)
        reason = f"order-{name.removeprefix('accepted_').replace('_', '-')}"
        if name in _WHOLE and value is not None and type(value) is not int:
            raise RefusedError(reason, f"{name} must be a whole number, not {value!r}")
        try:
            within(part, name, **limits)
        except ValueError as error:
            raise RefusedError(reason, str(error)) from error
    screen_parameters(order.model, size, "model")
    if order.direction is not None:
        screen_parameters(order.direction, gradient_size, "direction")
    if (plan := order.assignment) is not None:
        if plan.quotas.dtype != np.int64 or not plan.quotas.shape == plan.label_weights.shape == (regions,):
            raise RefusedError("plan-shape", f"expected quotas and weights for {regions} regions")
        if plan.quotas.min(initial=0) < 0 or plan.quotas.max(initial=0) > capacity or plan.quotas.sum() > capacity:
            raise RefusedError("plan-size", f"the quotas must be 0 or more and sum to {capacity} at most")
        weights = np.append(plan.label_weights, plan.mass_per_slot)
        if not (np.isfinite(weights).all() and weights.min() >= 0):
            raise RefusedError("plan-weights", "weights must be finite and 0 or more")


def screen_parameters(vector: Vector, size: int, name: str) -> None:
    """Raises where a vector is not `size` finite float32 numbers of a size that parameters have."""
    if vector.shape != (size,) or vector.dtype != np.float32:
        raise RefusedError(f"{name}-shape", f"expected {size} float32 numbers, got {vector.dtype} {vector.shape}")
    if not np.isfinite(vector).all():
        raise RefusedError(f"{name}-not-finite", "it holds NaN or infinity")
    if np.abs(vector).max(initial=0.0) > LARGEST_PARAMETER:
        raise RefusedError(f"{name}-too-large", f"it holds numbers beyond {LARGEST_PARAMETER:g}")
