"""Bounds that a minority of outliers cannot move, from medians and quartiles.

References
----------
Rousseeuw and Croux, Alternatives to the median absolute deviation, 1993.
"""

from collections.abc import Sequence

import numpy as np

from fedkeep.core.types import FloatArray

MIN_OBSERVATIONS = 5
"""With fewer values than these no bound is drawn from them."""
MAD_TO_DEVIATION = 1.4826
"""A normal deviation over its median absolute deviation."""
_UPPER = 3 * MAD_TO_DEVIATION
_MEDIAN_RATIO = 4.0


def median(values: Sequence[float] | FloatArray) -> float:
    """Return the median; as `np.median`, which takes ten times as long for a few numbers.

    Parameters
    ----------
    values : sequence of float
        Numbers, at least one; NaN where one of them is.

    Examples
    --------
    >>> median([3.0, 1.0, 2.0]), median([4.0, 1.0])
    (2.0, 2.5)
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    middle = len(ordered) // 2
    if np.isnan(ordered[-1]):
        return float("nan")
    if len(ordered) % 2:
        return float(ordered[middle])
    return float((ordered[middle - 1] + ordered[middle]) / 2)


def upper_quartile(values: FloatArray) -> float:
    """Return what a quarter of the values exceed; as `np.quantile(values, 0.75)`.

    Examples
    --------
    >>> upper_quartile(np.array([1.0, 2.0, 3.0, 4.0]))
    3.25
    """
    ordered = np.sort(values)
    if np.isnan(ordered[-1]):
        return float("nan")
    place = 0.75 * (len(ordered) - 1)
    below = int(place)
    share = place - below
    low, high = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
    if share >= 0.5:  # from the nearer one, as numpy does it
        return high - (high - low) * (1 - share)
    return low + (high - low) * share


def mad_upper_bound(values: FloatArray) -> float:
    """Return the value three robust deviations above the median, measured in logarithms.

    Parameters
    ----------
    values : FloatArray
        Numbers above 0, at least one.
    """
    centre = median(values)
    with np.errstate(over="ignore", divide="ignore"):  # then there is no bound
        return centre * float(np.exp(_UPPER * median(np.abs(np.log(values / centre)))))


def robust_cap(claims: FloatArray) -> float:
    """Return the most that a claim counts for: four times the median, or `mad_upper_bound` if more.

    Claims of 0 say nothing; without any other there is no cap.
    """
    positive = claims[claims > 0]
    if not len(positive):
        return np.inf
    return max(_MEDIAN_RATIO * median(positive), mad_upper_bound(positive))


def weight_cap(weights: FloatArray) -> float:
    """Return the most that a weight counts for: the upper quartile, or `mad_upper_bound` if more.

    Examples
    --------
    >>> weight_cap(np.array([1.0, 1.0, 1.0, 1.0, 1e9]))
    1.0
    >>> round(weight_cap(np.array([1.0, 2.0, 4.0, 8.0, 16.0])), 1)
    87.3
    """
    return max(upper_quartile(weights), mad_upper_bound(weights))
