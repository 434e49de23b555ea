"""The Gaussian mechanism: noise for a target (epsilon, delta), and the epsilon of past releases.

The cost of a release is (sensitivity / standard deviation)^2. Costs of Gaussian releases add up
exactly, so one sum is all the state that an accountant needs; dp-accounting converts between such
a sum and an epsilon.
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
"""Draws the given number of independent standard normal numbers."""
_DRAWS_PER_NORMAL = 4


@cache
def budget_cost(epsilon: float, delta: float) -> float:
    """Return the total cost that (epsilon, delta) allows."""
    with optional_import("privacy accounting", "privacy"):
        from dp_accounting import get_sigma_gaussian
    return float(get_sigma_gaussian(epsilon, delta)) ** -2


def epsilon_spent(cost: float, delta: float) -> float:
    """Return the epsilon at `delta` of Gaussian releases whose costs sum to `cost`."""
    if cost == 0:
        return 0.0
    with optional_import("privacy accounting", "privacy"):
        from dp_accounting import get_epsilon_gaussian
    return float(get_epsilon_gaussian(cost**-0.5, delta))


def clipped(vector: AnyArray, bound: float) -> FloatArray:
    """Return the vector in float64, scaled down to the L2 norm `bound` where it is longer."""
    values = np.asarray(vector, dtype=np.float64)
    return values * (bound / max(float(np.linalg.norm(values)), bound))


def system_normal(size: int) -> FloatArray:
    """Draw standard normal numbers from the operating system's randomness; no seed repeats them.

    Each is a scaled sum of four Box-Muller draws. The gaps between floating-point numbers, which
    distinguish single draws, are then of no practical use to an attacker.

    References
    ----------
    Holohan and Braghin, Secure random sampling in differential privacy, ESORICS 2021.
    """
    count = size * _DRAWS_PER_NORMAL
    bits = np.frombuffer(secrets.token_bytes(16 * count), dtype=np.uint64).reshape(2, count)
    radius, angle = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    draws = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
    return np.asarray(
        draws.reshape(_DRAWS_PER_NORMAL, size).sum(axis=0) / math.sqrt(_DRAWS_PER_NORMAL)
    )
