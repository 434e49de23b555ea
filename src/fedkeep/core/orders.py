"""What an order must be before a device follows it: a server's word is input too.

The bounds stand here and nowhere else, for agents, Flower nodes and Keepers alike. They are wide: no sound schedule
comes near them, and no order within them can harm more than the round it belongs to.
"""

from math import isfinite

import numpy as np

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import Assignment, LocalTraining, TrainOrder, Vector

LAST_ROUND = 10_000_000
MOST_EPOCHS = 1_000
LARGEST_BATCH = 1_000_000
"""The largest mini-batch that may be named."""
FASTEST_RATE = 100.0
STRONGEST_PROXIMAL = 1e6
LARGEST_PARAMETER = 1e6
"""By size, of a model or a direction."""


def screen_order(order: TrainOrder, size: int, gradient_size: int, regions: int, capacity: int) -> None:
    """Raises where an order does not fit a device of these sizes, or is out of bounds; nothing is stored before."""
    _screen_round(order.round, 0)
    if order.accepted_round is not None:
        _screen_round(order.accepted_round, -1)
    _screen_training(order.local)
    screen_parameters(order.model, size, "model")
    if order.direction is not None:
        screen_parameters(order.direction, gradient_size, "direction")
    if order.assignment is not None:
        _screen_plan(order.assignment, regions, capacity)


def screen_parameters(vector: Vector, size: int, name: str) -> None:
    """Raises where a vector is not `size` finite float32 numbers of a size that parameters have."""
    if vector.shape != (size,) or vector.dtype != np.float32:
        raise RefusedError(f"{name}-shape", f"expected {size} float32 numbers, got {vector.dtype} {vector.shape}")
    if not np.isfinite(vector).all():
        raise RefusedError(f"{name}-not-finite", "it holds NaN or infinity")
    if np.abs(vector).max(initial=0.0) > LARGEST_PARAMETER:
        raise RefusedError(f"{name}-too-large", f"it holds numbers beyond {LARGEST_PARAMETER:g}")


def _screen_round(round_: int, first: int) -> None:
    if not _whole(round_) or not first <= round_ <= LAST_ROUND:
        raise RefusedError("order-round", f"a round is a whole number from {first} to {LAST_ROUND}, not {round_!r}")


def _screen_training(local: LocalTraining) -> None:
    _within("learning rate", local.learning_rate, FASTEST_RATE, above_zero=True)
    _within("proximal", local.proximal, STRONGEST_PROXIMAL)
    if not _whole(local.epochs) or not 1 <= local.epochs <= MOST_EPOCHS:
        raise RefusedError("order-epochs", f"epochs are a whole number from 1 to {MOST_EPOCHS}, not {local.epochs!r}")
    size = local.batch_size
    if size is not None and (not _whole(size) or not 1 <= size <= LARGEST_BATCH):
        raise RefusedError("order-batch-size", f"a batch has from 1 to {LARGEST_BATCH} samples, not {size!r}")


def _within(name: str, value: float, most: float, *, above_zero: bool = False) -> None:
    sound = isinstance(value, int | float) and isfinite(value) and 0 <= value <= most
    if not sound or (above_zero and value == 0):
        reason = f"order-{name.replace(' ', '-')}"
        least = "above 0, up to" if above_zero else "from 0 to"
        raise RefusedError(reason, f"a {name} is a number {least} {most:g}, not {value!r}")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _screen_plan(plan: Assignment, regions: int, capacity: int) -> None:
    shape = (regions,)
    if plan.quotas.dtype != np.int64 or plan.quotas.shape != shape or plan.label_weights.shape != shape:
        raise RefusedError("plan-shape", f"expected quotas and weights for {regions} regions")
    if plan.quotas.min(initial=0) < 0 or plan.quotas.max(initial=0) > capacity or plan.quotas.sum() > capacity:
        raise RefusedError("plan-size", f"the quotas must be 0 or more and sum to {capacity} at most")
    weights = np.append(plan.label_weights, plan.mass_per_slot)
    if not (np.isfinite(weights).all() and weights.min() >= 0):
        raise RefusedError("plan-weights", "weights must be finite and 0 or more")
