"""Nothing from outside counts before it is checked; the offender is named and the rest goes on."""

from collections import Counter
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import RejectedError
from fedkeep.core.planning.profiles import FASTEST
from fedkeep.core.types import BoolArray, FloatArray, Profile, Report, TrainOrder, Vector

_ROUNDING = 1e-6
"""What sums of many numbers on a grid may be off by."""
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
"""Of an order, for agents, Flower nodes and Keepers alike; so wide that no sound schedule comes near them."""
_WHOLE = {"round", "accepted_round", "epochs", "batch_size"}


@dataclass(frozen=True)
class Limits:
    """How far a report or a profile may stray before it is refused or cut."""

    update_norm: float = 1e3
    """L2 bound on a device's change to the model; beyond it the report is refused."""
    update_ratio: float = 10.0
    """A change more than this many times as long as is usual (`core.usual`) is shortened; ten times that: refused."""
    gradient_norm: float = 1e3
    """L2 bound on g_hat_c; beyond it the report is refused."""
    growth: float = 10.0
    """A declared rate counts at most this many times what the same device declared before."""
    enabled: bool = True
    """`false`: no report, rate, capacity, weight or gradient is cut or capped, nor rejected for its size.

    Form (shapes, finite numbers) and replays are checked all the same.
    """

    def __post_init__(self) -> None:
        check_range(self, "update_norm", "update_ratio", "gradient_norm", "growth", above=0)


def screen_samples(
    x: Any, y: Any, shape: tuple[int, ...], labels: int
) -> tuple[BoolArray, Counter[str]]:
    """Which samples are sound, and how many of the others were refused for which reason."""
    x, y = np.asarray(x), np.asarray(y)
    refused: Counter[str] = Counter()
    if x.shape[1:] != shape or not np.issubdtype(x.dtype, np.number):
        refused["shape"] = len(y)
        return np.zeros(len(y), dtype=bool), refused
    known: BoolArray = np.zeros(len(y), dtype=bool)
    if np.issubdtype(y.dtype, np.integer) or np.issubdtype(y.dtype, np.floating):
        with np.errstate(invalid="ignore"):
            known = (y >= 0) & (y < labels) & (y == np.floor(y))
    finite = np.isfinite(x).reshape(len(y), -1).all(axis=1)
    for reason, bad in (("label", ~known), ("not-finite", known & ~finite)):
        if bad.any():
            refused[reason] = int(bad.sum())
    return known & finite, refused


def screen_profile(profile: Profile, regions: int) -> Profile:
    """The profile, if it is one."""
    if not isinstance(profile.capacity, int) or profile.capacity < 0:
        raise RejectedError(
            "bad-capacity", f"a capacity is a whole number of at least 0, not {profile.capacity!r}"
        )
    velocity = _screen_vector(profile.velocity, (regions,), np.float64, "velocity")
    if velocity.min(initial=0) < 0:
        raise RejectedError("negative-velocity", "a velocity is at least 0")
    if velocity.max(initial=0) > FASTEST:
        raise RejectedError("velocity-too-large", f"beyond {FASTEST:g} it is no measurement")
    return replace(profile, velocity=velocity)


def robust_cap(claims: FloatArray) -> float:
    """The most that a claim counts for: four times the median, or three spreads above it if that is more.

    Neither moves far while liars are few.
    """
    positive = claims[claims > 0]
    return (
        max(4.0 * float(np.median(positive)), mad_upper_bound(positive))
        if len(positive)
        else np.inf
    )


def mad_upper_bound(values: FloatArray) -> float:
    """Three robust spreads above the median of values above 0, in their logarithms: beyond is nothing usual."""
    centre = float(np.median(values))
    return centre * float(np.exp(3 * 1.4826 * np.median(np.abs(np.log(values / centre)))))


def screen_report(
    report: Report, model: Vector, gradient_size: int, heaviest: float, limits: Limits
) -> Report:
    """The report, its weight cut to `heaviest`; raises `RejectedError` if any part of it is unsound."""
    update = _screen_vector(report.model, model.shape, np.float32, "model")
    if not 0 <= report.weight < np.inf:
        raise RejectedError(
            "bad-weight", f"a weight is a finite number of at least 0, not {report.weight}"
        )
    if report.weight > 0 and not update.any() and model.any():
        raise RejectedError("zero-model", "every parameter of the model is zero")
    length = _length(np.subtract(update, model, dtype=np.float64))
    if limits.enabled and length > limits.update_norm:
        raise RejectedError("large-update", f"the model moved by more than {limits.update_norm:g}")
    if report.steps < 0 or report.samples < 0 or report.gradient_samples < 0:
        raise RejectedError("bad-count", "steps and samples are at least 0")
    gradient = report.local_gradient
    if gradient is not None:
        gradient = _screen_vector(gradient, (gradient_size,), np.float32, "estimator")
        if report.gradient_samples > 0 and not gradient.any():
            raise RejectedError("zero-estimator", "every entry of the estimator is zero")
        if limits.enabled and _length(gradient) > limits.gradient_norm:
            raise RejectedError("large-estimator", f"its norm is above {limits.gradient_norm:g}")
    return replace(
        report, model=update, weight=min(report.weight, heaviest), local_gradient=gradient
    )


def screen_sum(
    updates: FloatArray, weight: float, direction: Vector | None, limits: Limits
) -> None:
    """Refuses sums that sound reports cannot add up to: a mean is no longer than the longest of its parts."""
    if weight < 0:
        raise RejectedError("bad-weight", f"the weights add up to {weight}")
    if _length(updates) > 1.001 * limits.update_norm * weight + _ROUNDING:
        raise RejectedError(
            "large-update", f"the mean update is longer than {limits.update_norm:g}"
        )
    if direction is not None and _length(direction) > 1.001 * limits.gradient_norm:
        raise RejectedError(
            "large-estimator", f"the mean estimator is longer than {limits.gradient_norm:g}"
        )


def screen_order(
    order: TrainOrder, size: int, gradient_size: int, regions: int, capacity: int
) -> None:
    """Raises where an order does not fit a device of these sizes, or is out of bounds; nothing is stored before."""
    for name, limits in _BOUNDS.items():
        part = order if hasattr(order, name) else order.local
        value = getattr(part, name)
        reason = f"order-{name.removeprefix('accepted_').replace('_', '-')}"
        if name in _WHOLE and value is not None and type(value) is not int:
            raise RejectedError(reason, f"{name} must be a whole number, not {value!r}")
        try:
            check_range(part, name, **limits)
        except ValueError as error:
            raise RejectedError(reason, str(error)) from error
    screen_parameters(order.model, size, "model")
    if order.direction is not None:
        screen_parameters(order.direction, gradient_size, "direction")
    if (plan := order.assignment) is not None:
        if plan.quotas.dtype != np.int64 or not plan.quotas.shape == plan.label_weights.shape == (
            regions,
        ):
            raise RejectedError("plan-shape", f"expected quotas and weights for {regions} regions")
        if (
            plan.quotas.min(initial=0) < 0
            or plan.quotas.max(initial=0) > capacity
            or plan.quotas.sum() > capacity
        ):
            raise RejectedError(
                "plan-size", f"the quotas must be 0 or more and sum to {capacity} at most"
            )
        weights = np.append(plan.label_weights, plan.mass_per_slot)
        if not (np.isfinite(weights).all() and weights.min() >= 0):
            raise RejectedError("plan-weights", "weights must be finite and 0 or more")


def screen_parameters(vector: Vector, size: int, name: str) -> None:
    """Raises where a vector is not `size` finite float32 numbers of a size that parameters have."""
    if vector.shape != (size,) or vector.dtype != np.float32:
        raise RejectedError(
            f"{name}-shape", f"expected {size} float32 numbers, got {vector.dtype} {vector.shape}"
        )
    if not np.isfinite(vector).all():
        raise RejectedError(f"{name}-not-finite", "it holds NaN or infinity")
    if np.abs(vector).max(initial=0.0) > LARGEST_PARAMETER:
        raise RejectedError(f"{name}-too-large", f"it holds numbers beyond {LARGEST_PARAMETER:g}")


def _screen_vector(values: Any, shape: tuple[int, ...], dtype: Any, name: str) -> np.ndarray:
    """The array, if shape and dtype match exactly (nothing is broadcast) and every number is finite."""
    if not isinstance(values, np.ndarray) or values.shape != shape:
        found = values.shape if isinstance(values, np.ndarray) else type(values).__name__
        raise RejectedError(f"{name}-shape", f"expected an array of shape {shape}, got {found}")
    if values.dtype != dtype:
        raise RejectedError(f"{name}-dtype", f"expected {np.dtype(dtype)}, got {values.dtype}")
    if not np.isfinite(values).all():
        raise RejectedError(f"{name}-not-finite", "it holds NaN or infinity")
    return values


def _length(values: np.ndarray) -> float:
    exact = values.astype(np.float64, copy=False)
    return sqrt(np.dot(exact, exact))
