"""Bounds that a minority of outliers cannot move, from medians and quartiles.

References
----------
Rousseeuw and Croux, Alternatives to the median absolute deviation, 1993.
"""

import numpy as np

from fedkeep.core.types import FloatArray

MIN_OBSERVATIONS = 5
"""With fewer values than these no bound is drawn from them."""
MAD_TO_DEVIATION = 1.4826
"""A normal deviation over its median absolute deviation."""
_UPPER = 3 * MAD_TO_DEVIATION
_MEDIAN_RATIO = 4.0


def mad_upper_bound(values: FloatArray) -> float:
    """Return the value three robust deviations above the median, measured in logarithms.

    Parameters
    ----------
    values : FloatArray
        Numbers above 0, at least one.
    """
    centre = float(np.median(values))
    with np.errstate(over="ignore", divide="ignore"):  # then there is no bound
        return centre * float(np.exp(_UPPER * np.median(np.abs(np.log(values / centre)))))


def robust_cap(claims: FloatArray) -> float:
    """Return the most that a claim counts for: four times the median, or `mad_upper_bound` if more.

    Claims of 0 say nothing; without any other there is no cap.
    """
    positive = claims[claims > 0]
    if not len(positive):
        return np.inf
    return max(_MEDIAN_RATIO * float(np.median(positive)), mad_upper_bound(positive))


def weight_cap(weights: FloatArray) -> float:
    """Return the most that a weight counts for: the upper quartile, or `mad_upper_bound` if more.

    Examples
    --------
    >>> weight_cap(np.array([1.0, 1.0, 1.0, 1.0, 1e9]))
    1.0
    >>> round(weight_cap(np.array([1.0, 2.0, 4.0, 8.0, 16.0])), 1)
    87.3
    """
    return max(float(np.quantile(weights, 0.75)), mad_upper_bound(weights))
