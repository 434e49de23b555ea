"""Gaussian noise: how much of it a target (epsilon, delta) needs, and what releases under it have cost.

The cost of a release is (sensitivity / standard deviation)^2. Costs of Gaussian releases add up exactly, so
one sum is all the state that an accountant needs; dp-accounting turns such a sum into an epsilon and back.
"""

import math
import secrets
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Literal, TypeAlias

import numpy as np

from fedkeep.core.errors import ConfigError, needing
from fedkeep.core.types import AnyArray, FloatArray

NormalSource: TypeAlias = Callable[[int], FloatArray]
"""Draws that many independent standard normal numbers."""
Observer: TypeAlias = Literal["server", "outsider"]
Sampling: TypeAlias = Literal["poisson", "without-replacement"]

_DRAWS_PER_NORMAL = 4


def _accounting() -> ModuleType:
    with needing("privacy accounting", "privacy"):
        import dp_accounting
    module: ModuleType = dp_accounting
    return module


@cache
def budget_cost(epsilon: float, delta: float) -> float:
    """The total cost that (epsilon, delta) allows."""
    require_within("epsilon", epsilon)
    require_within("delta", delta, below=1)
    return float(_accounting().get_sigma_gaussian(epsilon, delta)) ** -2


def epsilon_spent(cost: float, delta: float) -> float:
    """The epsilon at `delta` of Gaussian releases whose costs sum to `cost`."""
    require_within("delta", delta, below=1)
    if not cost >= 0:
        raise ConfigError(f"a privacy cost must be 0 or more, got {cost}")
    if cost == 0:
        return 0.0
    return float(_accounting().get_epsilon_gaussian(cost**-0.5, delta))


def amplified_epsilon(
    multiplier: float,
    rounds: int,
    delta: float,
    *,
    participants: int,
    population: int,
    sampling: Sampling,
    observer: Observer,
) -> float:
    """The device-level epsilon over `rounds` rounds, with so many participants of the population in each.

    Less than without sampling only for an observer who sees aggregates and cannot tell who took part. The
    server draws the participants, so against the server nothing is amplified. "poisson": each device flips
    its own coin (add or remove a device); "without-replacement": a fixed number is drawn (replace one).
    """
    require_within("noise multiplier", multiplier)
    require_within("rounds", rounds)
    if not 0 < participants <= population:
        raise ConfigError(f"participants must be between 1 and the population {population}, got {participants}")
    if observer == "server":
        return epsilon_spent(rounds * multiplier**-2, delta)
    accounting = _accounting()
    release = accounting.GaussianDpEvent(multiplier)
    if sampling == "poisson":
        from dp_accounting import pld

        accountant = pld.PLDAccountant()
        event = accounting.PoissonSampledDpEvent(participants / population, release)
    else:
        from dp_accounting import rdp

        accountant = rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
        event = accounting.SampledWithoutReplacementDpEvent(population, participants, release)
    return float(accountant.compose(event, rounds).get_epsilon(require_within("delta", delta, below=1)))


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
    return np.asarray(draws.reshape(_DRAWS_PER_NORMAL, size).sum(axis=0) / math.sqrt(_DRAWS_PER_NORMAL))


def require_within(name: str, value: float, below: float = math.inf) -> float:
    """The value, refused unless it lies strictly between 0 and `below`."""
    if not 0 < value < below:
        must = "be a finite number above 0" if below == math.inf else f"lie between 0 and {below:g}"
        raise ConfigError(f"{name} must {must}, got {value}")
    return value
