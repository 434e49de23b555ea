"""Randomness that depends on what it is for, never on when or in what order it is drawn."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.types import IntArray, Scores

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix as the finaliser of SplitMix64: every input bit reaches every output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform_keys(seed: int, counters: IntArray) -> Scores:
    """Draw one uniform number in [0, 1) per counter, by seed and counter alone.

    >>> uniform_keys(7, np.array([3, 4])).round(3).tolist()
    [0.549, 0.604]
    >>> uniform_keys(7, np.array([4])).round(3).tolist()
    [0.604]
    """
    with np.errstate(over="ignore"):
        base = _mix(np.array([seed], dtype=np.uint64) + _GOLDEN)
        bits = _mix(base + counters.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def child_seed(seed: int, *path: int | str) -> int:
    """Derive a seed for a named purpose under `seed`.

    >>> child_seed(7, "device", 42) == child_seed(7, "device", 42) != child_seed(7, "device", 43)
    True
    """
    name = "/".join(map(str, (seed, *path))).encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 1


def generator(seed: int, *path: int | str) -> "np.random.Generator":
    """Make a numpy generator for a named purpose under `seed`.

    >>> one, other = (generator(7, "select", 0) for _ in range(2))
    >>> one.permutation(5).tolist() == other.permutation(5).tolist()
    True
    """
    return np.random.default_rng(child_seed(seed, *path))
