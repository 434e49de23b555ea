"""Past measurements that policies may ask for, kept by the device so that chunking cannot matter."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fedkeep.core.types import FloatArray, Scores, State


class Memory:
    """Windows, running maxima and running means of named quantities; grows by what is asked of it, never by time."""

    def __init__(self) -> None:
        self._kept: State = {}

    def window(self, name: str, values: Scores, k: int, *, remember: bool) -> FloatArray:
        """The k values before each of `values`, (n, k), NaN where there were none."""
        key = f"window/{name}/{k}"
        tail = self._kept.get(key, np.full(k, np.nan))
        if not remember:
            return np.broadcast_to(tail, (len(values), k))
        joined = np.concatenate([tail, values])
        self._kept[key] = joined[len(joined) - k :].copy()
        return sliding_window_view(joined, k)[: len(values)]

    def running_max(self, name: str, values: Scores, *, remember: bool) -> Scores:
        key = f"max/{name}"
        peak = self._kept.get(key, np.array([-np.inf]))
        if not remember:
            return np.broadcast_to(peak, values.shape)
        peaks = np.maximum.accumulate(np.concatenate([peak, values]))
        self._kept[key] = peaks[-1:].copy()
        return peaks[1:]

    def running_mean(self, name: str, values: Scores, *, remember: bool) -> Scores:
        key = f"mean/{name}"
        total, count = self._kept.get(key, np.zeros(2))
        if not remember:
            return np.full(values.shape, total / count if count else np.inf)
        totals = np.cumsum(np.concatenate([[total], values]))
        counts = count + np.arange(len(values) + 1)
        self._kept[key] = np.array([totals[-1], counts[-1]])
        means: Scores = totals[1:] / counts[1:]
        return means

    def snapshot(self) -> State:
        return {name: kept.copy() for name, kept in self._kept.items()}

    def restore(self, state: State) -> None:
        self._kept = {name: np.asarray(kept, dtype=np.float64).copy() for name, kept in state.items()}


def percentile(windows: FloatArray, q: float) -> Scores:
    """The q-th percentile of each row, NaN left out; infinite where a row is empty, so that nothing exceeds it."""
    full = ~np.isnan(windows[:, 0])
    limits = np.full(len(windows), np.inf)
    if full.any():
        limits[full] = np.percentile(windows[full], q, axis=1)
    for i in np.flatnonzero(~full):
        known = windows[i][~np.isnan(windows[i])]
        if len(known):
            limits[i] = np.percentile(known, q)
    return limits
