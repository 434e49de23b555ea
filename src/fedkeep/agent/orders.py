"""What an order must be before a device follows it."""

from __future__ import annotations

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.errors import RefusedError
from fedkeep.core.types import Assignment, TrainOrder, Vector


def check_order(order: TrainOrder, device: Device) -> None:
    """Raises where an order does not fit the device: wrong sizes, numbers that are none, more slots than it has."""
    check_vector(order.model, device.learner.size, "model")
    if order.direction is not None:
        check_vector(order.direction, device.learner.gradient_size, "direction")
    if order.assignment is not None:
        _check_plan(order.assignment, device)


def _check_plan(plan: Assignment, device: Device) -> None:
    shapes = {(device.regions.count,), (1,) if device.policy.balanced else (device.regions.count,)}
    fits = plan.quotas.dtype == np.int64 and plan.quotas.shape == plan.label_weights.shape
    if not fits or plan.quotas.shape not in shapes:
        raise RefusedError("plan-shape", f"expected quotas and weights for {device.regions.count} regions")
    if plan.quotas.min(initial=0) < 0 or plan.quotas.sum() > device.capacity:
        raise RefusedError("plan-size", f"the quotas must be 0 or more and sum to {device.capacity} at most")
    weights = np.append(plan.label_weights, plan.mass_per_slot)
    if not (np.isfinite(weights).all() and weights.min() >= 0):
        raise RefusedError("plan-weights", "weights must be finite and 0 or more")


def check_vector(vector: Vector, size: int, name: str) -> None:
    """Raises where a vector is not `size` finite float32 numbers."""
    if vector.shape != (size,) or vector.dtype != np.float32:
        raise RefusedError(f"{name}-shape", f"expected {size} float32 numbers, got {vector.dtype} {vector.shape}")
    if not np.isfinite(vector).all():
        raise RefusedError(f"{name}-not-finite", "it holds NaN or infinity")
