"""Gaussian noise: how much of it a target (epsilon, delta) needs, and what releases under it have cost.

The cost of a release is (sensitivity / standard deviation)^2. Costs of Gaussian releases add up exactly, so
one sum is all the state that an accountant needs; dp-accounting turns such a sum into an epsilon and back.
"""

import math
import secrets
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np

from fedkeep.core.errors import optional_import
from fedkeep.core.types import AnyArray, FloatArray

NormalSource: TypeAlias = Callable[[int], FloatArray]
"""Draws that many independent standard normal numbers."""
_DRAWS_PER_NORMAL = 4


@cache
def budget_cost(epsilon: float, delta: float) -> float:
    """The total cost that (epsilon, delta) allows."""
    with optional_import("privacy accounting", "privacy"):
        from dp_accounting import get_sigma_gaussian
    return float(get_sigma_gaussian(epsilon, delta)) ** -2


def epsilon_spent(cost: float, delta: float) -> float:
    """The epsilon at `delta` of Gaussian releases whose costs sum to `cost`."""
    if cost == 0:
        return 0.0
    with optional_import("privacy accounting", "privacy"):
        from dp_accounting import get_epsilon_gaussian
    return float(get_epsilon_gaussian(cost**-0.5, delta))


def clipped(vector: AnyArray, bound: float) -> FloatArray:
    """The vector, shortened to `bound` where it is longer."""
    values = np.asarray(vector, dtype=np.float64)
    return values * (bound / max(float(np.linalg.norm(values)), bound))


def system_normal(size: int) -> FloatArray:
    """Standard normal numbers made of the operating system's randomness, which no seed can repeat.

    Each is a scaled sum of four Box-Muller draws, so that the gaps between floating-point numbers, by which
    single draws can be told apart, are of no practical use to an attacker.
    """
    count = size * _DRAWS_PER_NORMAL
    bits = np.frombuffer(secrets.token_bytes(16 * count), dtype=np.uint64).reshape(2, count)
    radius, angle = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    draws = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
    return np.asarray(
        draws.reshape(_DRAWS_PER_NORMAL, size).sum(axis=0) / math.sqrt(_DRAWS_PER_NORMAL)
    )
