"""Percentiles of past measurements, for policies."""

import numpy as np

from fedkeep.core.types import FloatArray, Scores


def percentile(windows: FloatArray, q: float) -> Scores:
    """Take the q-th percentile of each row, NaN left out.

    It is infinite where a row is empty, so that nothing exceeds it.

    >>> percentile(np.array([[1.0, 2.0, 9.0], [np.nan, 2.0, 4.0], [np.nan] * 3]), 50)
    array([ 2.,  3., inf])
    """
    full = ~np.isnan(windows[:, 0])
    limits = np.full(len(windows), np.inf)
    if full.any():
        limits[full] = np.percentile(windows[full], q, axis=1)
    for i in np.flatnonzero(~full):
        known = windows[i][~np.isnan(windows[i])]
        if len(known):
            limits[i] = np.percentile(known, q)
    return limits
