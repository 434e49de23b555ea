"""Student's t distribution, as far as an interval over a few seeds needs it."""

from __future__ import annotations

import math


def coverage(t: float, freedom: int) -> float:
    """P(|T| <= t) for whole degrees of freedom: a finite series in the cosine of atan(t / sqrt(freedom))."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    series = math.sin(angle) * total
    return (angle + series) * 2 / math.pi if odd else series


def quantile(level: float, freedom: int) -> float:
    """The t whose two-sided coverage is `level`, found by bisection."""
    low, high = 0.0, 1.0
    while coverage(high, freedom) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if coverage(middle, freedom) < level else (low, middle)
    return high


def interval(values: list[float], level: float = 0.95) -> float | None:
    """Half the width of the mean's confidence interval; None of fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return quantile(level, n - 1) * math.sqrt(variance / n)
