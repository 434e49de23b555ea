"""Validation of what comes from outside: samples, profiles, reports, sums and orders.

Nothing from outside counts before it is checked; its sender is named and the rest goes on. Form
(shape, dtype, finite numbers) is always checked; size only as `Limits` say.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import RejectedError, RejectionReason
from fedkeep.core.gradients.codec import PackedVector
from fedkeep.core.gradients.layout import GradientLayout
from fedkeep.core.planning.profiles import FASTEST
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import BoolArray, FloatArray, Profile, Report, TrainOrder, Vector

_DISAGREEMENT = {"float32": 0.01, "float16": 0.02, "int8": 0.25, "uint8": 1.0}
"""How far the products of a sketch may differ in each form that it is packed in: more than twice
what was seen of honest devices; in 4 bits (`uint8` holds two of them) nearly twice."""
_LEAST_RANK = 4
"""Sketches of a lower rank in 4 bits may differ by as much as two that have nothing in common."""
_ROUNDING = 1e-6
"""What sums of many numbers on a grid may be off by."""
_SUM_SLACK = 1.001
"""The same as a factor, for the means of sums."""
LAST_ROUND = 10_000_000
MOST_EPOCHS = 1_000
FASTEST_RATE = 100.0
LARGEST_PARAMETER = 1e6
"""The largest absolute value in a model or a global gradient."""
_ORDER_BOUNDS: dict[str, dict[str, float]] = {
    "round": {"least": 0, "most": LAST_ROUND},
    "accepted_round": {"least": -1, "most": LAST_ROUND},
    "learning_rate": {"above": 0, "most": FASTEST_RATE},
    "proximal": {"least": 0, "most": 1e6},
    "epochs": {"least": 1, "most": MOST_EPOCHS},
    "batch_size": {"least": 1, "most": 1_000_000},
}
"""For agents, Flower nodes and Keepers alike; so wide that no valid schedule comes near them."""
_WHOLE = {"round", "accepted_round", "epochs", "batch_size"}


@dataclass(frozen=True)
class Limits:
    """How far a report or a profile may stray before it is rejected or cut."""

    update_norm: float = 1e3
    """L2 bound on a device's change to the model; beyond it the report is rejected."""
    update_ratio: float = 10.0
    """A change more than this many times the usual length is clipped; ten times that: rejected."""
    gradient_norm: float = 1e3
    """L2 bound on g_hat_c; beyond it the report is rejected."""
    growth: float = 10.0
    """A declared rate counts at most this many times what the same device declared before."""
    enabled: bool = True
    """`false`: nothing that a device reports is cut or capped, nor rejected for its size.

    Form (shapes, finite numbers) and replays are checked all the same.
    """

    def __post_init__(self) -> None:
        check_range(self, "update_norm", "update_ratio", "gradient_norm", "growth", above=0)


def screen_samples(
    x: Any,
    y: Any,
    shape: tuple[int, ...],
    labels: int,
    targets: NumberTargets | None = None,
) -> tuple[BoolArray, Counter[str]]:
    """Find which samples are valid.

    Parameters
    ----------
    x, y : array_like
        Samples and labels as they came.
    shape : tuple[int, ...]
        The shape of one sample.
    labels : int
        How many labels there are.
    targets : NumberTargets, optional
        What targets look like that are numbers; None: `y` are labels.

    Returns
    -------
    tuple[BoolArray, Counter[str]]
        Which samples are valid, and how many of the others were rejected for which reason.
    """
    x, y = np.asarray(x), np.asarray(y)
    rejected: Counter[str] = Counter()
    if x.shape[1:] != shape or not np.issubdtype(x.dtype, np.number):
        rejected["shape"] = len(y)
        return np.zeros(len(y), dtype=bool), rejected
    known: BoolArray = np.zeros(len(y), dtype=bool)
    if targets is not None:
        known = targets.valid(y)
    elif np.issubdtype(y.dtype, np.integer) or np.issubdtype(y.dtype, np.floating):
        with np.errstate(invalid="ignore"):
            known = (y >= 0) & (y < labels) & (y == np.floor(y))
    finite = np.isfinite(x).reshape(len(y), -1).all(axis=1)
    for reason, bad in (("label", ~known), ("not-finite", known & ~finite)):
        if bad.any():
            rejected[reason] = int(bad.sum())
    return known & finite, rejected


def screen_profile(profile: Profile, regions: int) -> Profile:
    """Return the profile if it is valid.

    Raises
    ------
    RejectedError
        If its capacity is no whole number of at least 0, or its velocities are not `regions` finite
        numbers of at least 0.
    """
    if not isinstance(profile.capacity, int) or profile.capacity < 0:
        raise RejectedError(
            RejectionReason.BAD_CAPACITY,
            f"a capacity is a whole number of at least 0, not {profile.capacity!r}",
        )
    velocity = _screen_vector(profile.velocity, (regions,), np.float64, "velocity")
    if velocity.min(initial=0) < 0:
        raise RejectedError(RejectionReason.NEGATIVE_VELOCITY, "a velocity is at least 0")
    if velocity.max(initial=0) > FASTEST:
        raise RejectedError(
            RejectionReason.VELOCITY_TOO_LARGE, f"a velocity is at most {FASTEST:g}"
        )
    return profile


def screen_report(
    report: Report, model: Vector, gradient_size: int, max_weight: float, limits: Limits
) -> Report:
    """Return the report as far as it counts.

    Parameters
    ----------
    report : Report
        As it came.
    model : Vector
        The global model that its round began with.
    gradient_size : int
        The length of a local gradient.
    max_weight : float
        The most that its weight counts for.
    limits : Limits
        Bounds on its size; none of them applies with `enabled = false`.

    Raises
    ------
    RejectedError
        If any part of it is invalid.
    """
    update = _screen_vector(report.model, model.shape, np.float32, "model")
    if not 0 <= report.weight < np.inf:
        raise RejectedError(
            RejectionReason.BAD_WEIGHT,
            f"a weight is a finite number of at least 0, not {report.weight}",
        )
    if report.steps < 0 or report.samples < 0 or report.gradient_samples < 0:
        raise RejectedError(RejectionReason.BAD_COUNT, "steps and samples are at least 0")
    gradient = report.local_gradient
    if gradient is not None:
        gradient = screen_gradient(gradient, gradient_size, report.gradient_samples, limits)
    valid = replace(report, model=update, local_gradient=gradient)
    if not limits.enabled:
        return valid
    _require_plausible(valid, model, limits)
    return replace(valid, weight=min(report.weight, max_weight))


def _require_plausible(report: Report, model: Vector, limits: Limits) -> None:
    """Raise where a report of valid form is of a size that no training gives it."""
    if report.weight > 0 and not report.model.any() and model.any():
        raise RejectedError(RejectionReason.ZERO_MODEL, "every parameter of the model is zero")
    if _length(np.subtract(report.model, model, dtype=np.float64)) > limits.update_norm:
        raise RejectedError(
            RejectionReason.LARGE_UPDATE, f"the model moved by more than {limits.update_norm:g}"
        )


def screen_gradient(gradient: Any, size: int, samples: int, limits: Limits) -> Vector:
    """Return a local gradient if it is valid.

    Parameters
    ----------
    gradient : array_like
        As it came.
    size : int
        The length it must have.
    samples : int
        How many arrivals it is the mean of.
    limits : Limits
        The bound on its norm.

    Raises
    ------
    RejectedError
        If it is anything else than `size` finite float32 numbers, all zero, or too long.
    """
    valid: Vector = _screen_vector(gradient, (size,), np.float32, "estimator")
    if not limits.enabled:
        return valid
    if samples > 0 and not valid.any():
        raise RejectedError(RejectionReason.ZERO_ESTIMATOR, "every entry of the estimator is zero")
    if _length(valid) > limits.gradient_norm:
        raise RejectedError(
            RejectionReason.LARGE_ESTIMATOR, f"its norm is above {limits.gradient_norm:g}"
        )
    return valid


def screen_sketch(gradient: Vector, layout: GradientLayout, limits: Limits) -> None:
    """Check that the two products of a sketch are of one matrix.

    Both lead to the same small matrix, Psi M Omega, up to the rounding of the sketch. What is made
    up without a gradient contradicts itself; noise for privacy does, too, and is not checked.

    Parameters
    ----------
    gradient : Vector
        A valid local gradient, in that layout.
    layout : GradientLayout
        How it is represented; of one that is kept whole nothing is checked.
    limits : Limits
        With `enabled = false` nothing is checked.

    Raises
    ------
    RejectedError
        If they differ by more than the encoding in which it came can make them.
    """
    if layout.whole or not limits.enabled:
        return
    packed = gradient.packed if isinstance(gradient, PackedVector) else None
    form = "float32" if packed is None else str(packed["packed"].dtype)
    if form == "uint8" and layout.rank < _LEAST_RANK:
        return
    found, most = layout.disagreement(np.asarray(gradient)), _DISAGREEMENT[form]
    if not found <= most:
        raise RejectedError(
            RejectionReason.ESTIMATOR_CONTRADICTS,
            f"the two products of its sketch differ by {found:.2g} of their length; rounding in "
            f"{form} explains {most:g}",
        )


def screen_sum(updates: FloatArray, weight: float, gradient: Vector | None, limits: Limits) -> None:
    """Check sums of a secure round: a mean is no longer than the longest of its parts.

    Raises
    ------
    RejectedError
        If no valid reports add up to these sums.
    """
    if weight < 0:
        raise RejectedError(RejectionReason.BAD_WEIGHT, f"the weights add up to {weight}")
    if _length(updates) > _SUM_SLACK * limits.update_norm * weight + _ROUNDING:
        raise RejectedError(
            RejectionReason.LARGE_UPDATE,
            f"the mean update is longer than {limits.update_norm:g}",
        )
    if gradient is not None and _length(gradient) > _SUM_SLACK * limits.gradient_norm:
        raise RejectedError(
            RejectionReason.LARGE_ESTIMATOR,
            f"the mean estimator is longer than {limits.gradient_norm:g}",
        )


def screen_order(
    order: TrainOrder, size: int, gradient_size: int, regions: int, capacity: int
) -> None:
    """Check an order before a device stores anything of it.

    Parameters
    ----------
    order : TrainOrder
        As it came.
    size, gradient_size : int
        The lengths of a model and of a global gradient.
    regions : int
        How many regions the plan divides.
    capacity : int
        The device's slots.

    Raises
    ------
    RejectedError
        If it does not fit a device of these sizes, or is out of bounds.
    """
    for name, bounds in _ORDER_BOUNDS.items():
        part = order if hasattr(order, name) else order.local
        value = getattr(part, name)
        reason = f"order-{name.removeprefix('accepted_').replace('_', '-')}"
        if name in _WHOLE and value is not None and type(value) is not int:
            raise RejectedError(
                RejectionReason(reason), f"{name} must be a whole number, not {value!r}"
            )
        try:
            check_range(part, name, **bounds)
        except ValueError as error:
            raise RejectedError(RejectionReason(reason), str(error)) from error
    screen_parameters(order.model, size, "model")
    if order.global_gradient is not None:
        screen_parameters(order.global_gradient, gradient_size, "direction")
    plan = order.assignment
    if plan is None:
        return
    shapes = (plan.quotas.shape, plan.label_weights.shape)
    if plan.quotas.dtype != np.int64 or shapes != ((regions,), (regions,)):
        raise RejectedError(
            RejectionReason.PLAN_SHAPE, f"expected quotas and weights for {regions} regions"
        )
    if (
        plan.quotas.min(initial=0) < 0
        or plan.quotas.max(initial=0) > capacity
        or plan.quotas.sum() > capacity
    ):
        raise RejectedError(
            RejectionReason.PLAN_SIZE,
            f"the quotas must be 0 or more and sum to {capacity} at most",
        )
    weights = np.append(plan.label_weights, plan.mass_per_slot)
    if not (np.isfinite(weights).all() and weights.min() >= 0):
        raise RejectedError(RejectionReason.PLAN_WEIGHTS, "weights must be finite and 0 or more")


def screen_parameters(vector: Vector, size: int, name: str) -> None:
    """Check that a vector is `size` finite float32 numbers of a size that parameters have.

    Parameters
    ----------
    vector : Vector
        A model or a global gradient as it came.
    size : int
        The length it must have.
    name : str
        `model` or `direction`: what a rejection calls it.

    Raises
    ------
    RejectedError
        If it is anything else.
    """
    if vector.shape != (size,) or vector.dtype != np.float32:
        raise RejectedError(
            RejectionReason(f"{name}-shape"),
            f"expected {size} float32 numbers, got {vector.dtype} {vector.shape}",
        )
    if not np.isfinite(vector).all():
        raise RejectedError(RejectionReason(f"{name}-not-finite"), "it holds NaN or infinity")
    if np.abs(vector).max(initial=0.0) > LARGEST_PARAMETER:
        raise RejectedError(
            RejectionReason(f"{name}-too-large"), f"it holds numbers beyond {LARGEST_PARAMETER:g}"
        )


def _screen_vector(values: Any, shape: tuple[int, ...], dtype: Any, name: str) -> np.ndarray:
    """Return the array if shape and dtype match exactly and every number is finite."""
    if not isinstance(values, np.ndarray) or values.shape != shape:
        found = values.shape if isinstance(values, np.ndarray) else type(values).__name__
        raise RejectedError(
            RejectionReason(f"{name}-shape"), f"expected an array of shape {shape}, got {found}"
        )
    if values.dtype != dtype:
        raise RejectedError(
            RejectionReason(f"{name}-dtype"), f"expected {np.dtype(dtype)}, got {values.dtype}"
        )
    if not np.isfinite(values).all():
        raise RejectedError(RejectionReason(f"{name}-not-finite"), "it holds NaN or infinity")
    return values


def _length(values: np.ndarray) -> float:
    exact = values.astype(np.float64, copy=False)
    return sqrt(np.dot(exact, exact))
