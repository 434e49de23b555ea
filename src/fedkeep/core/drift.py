"""Whether a stream has changed: means over windows that adapt, and sums of deviations."""

import math
from typing import NamedTuple

import numpy as np

from fedkeep.core.types import FloatArray

_BUCKETS = 5
"""Buckets of each size; one more merges the oldest two."""
_LEVELS = 14
"""Sizes of buckets; what would need a larger one is forgotten."""
_LEAST_BLOCKS = 4
"""Blocks on either side of a cut."""
_SOME_BLOCKS = 64
"""Blocks in a window from which it is looked at less often."""
_LOOK_EVERY = 4
_TIE = 1e-9
_LEAST_DIFFERENCES = 10
"""Differences of a length of runs before it counts: of fewer, one change would hide itself."""
_REMEMBERED = 500
"""Differences over which the mean of their squares is taken, in the long run."""


class MeanChange(NamedTuple):
    """A mean that has changed."""

    channel: int
    before: float
    after: float
    arrivals: int
    """How many values ago, to the precision of a bucket."""


class AdaptiveWindow:
    """ADWIN over several channels of values between 0 and 1, in blocks.

    The window grows while its mean stays, and loses its older part once two parts of it differ by
    more than chance allows. Streams have runs, so that chance is not that of independent values
    alone: `RunNoise` learns what is usual.

    Parameters
    ----------
    channels : int
        How many means are watched at a time.
    delta : float
        The probability of a false alarm of all channels at one look.
    block : int
        Values that enter the window together.

    References
    ----------
    Bifet and Gavalda, Learning from time-changing data with adaptive windowing, SDM 2007,
    section 2: the bound of equation (3.1) with the variance, and exponential histograms.

    Examples
    --------
    >>> window = AdaptiveWindow(1)
    >>> values = np.random.default_rng(0).random((2000, 1)) < np.repeat([0.2, 0.8], 1000)[:, None]
    >>> found = [window.add(part) for part in np.array_split(values, 25)]
    >>> [change] = [change for change in found if change]
    >>> round(change.before, 1), change.after > 0.6, len(window) < 1200
    (0.2, True, True)
    """

    def __init__(self, channels: int, delta: float = 0.002, block: int = 16) -> None:
        self._delta, self._block, self._channels = delta, block, channels
        self._noise = RunNoise(channels, block)
        self.reset()

    def reset(self) -> None:
        """Forget all values, and keep what is known of runs."""
        self._levels: list[list[FloatArray]] = [[]]
        """By size, the smallest first, buckets: each the sum of the means of its blocks."""
        self._rest = np.zeros((0, self._channels))
        self._since_look = 0

    def __len__(self) -> int:
        return self._block * sum(
            len(buckets) << level for level, buckets in enumerate(self._levels)
        )

    @property
    def mean(self) -> FloatArray:
        """The mean of each channel, (K,); NaN of an empty window."""
        sums = [bucket for buckets in self._levels for bucket in buckets]
        if not sums:
            return np.full(self._channels, np.nan)
        return np.asarray(np.sum(sums, axis=0) * self._block / len(self))

    def add(self, values: FloatArray) -> MeanChange | None:
        """Take in values, (n, K), and give the clearest change that they brought to light."""
        values = np.concatenate([self._rest, values]) if len(self._rest) else values
        whole = len(values) // self._block
        cut = whole * self._block
        self._rest = np.array(values[cut:], dtype=np.float64)
        if not whole:
            return None
        means = values[:cut].reshape(whole, self._block, -1).mean(axis=1)
        for mean in means:
            self._push(mean)
        self._since_look += whole
        often = len(self._levels) < math.log2(_SOME_BLOCKS)
        if not often and self._since_look < _LOOK_EVERY:
            return None
        self._since_look = 0
        return self._look()

    def _push(self, mean: FloatArray) -> None:
        """Take in one block, and merge buckets where there are too many of a size."""
        self._noise.add(mean)
        self._levels[0].append(mean)
        for level, buckets in enumerate(self._levels):
            if len(buckets) <= _BUCKETS:
                return
            merged = buckets[0] + buckets[1]
            del buckets[:2]
            if level + 1 == _LEVELS:
                return
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1].append(merged)

    def _look(self) -> MeanChange | None:
        """Cut the window where its parts differ most, if they differ by more than chance allows."""
        sizes, sums = self._oldest_first()
        blocks = sizes.cumsum()
        total = int(blocks[-1])
        places = np.flatnonzero(
            (blocks[:-1] >= _LEAST_BLOCKS) & (total - blocks[:-1] >= _LEAST_BLOCKS)
        )
        if not len(places):
            return None
        old, new = blocks[places, None], total - blocks[places, None]
        sum_old = sums.cumsum(axis=0)[places]
        mean_old, mean_new = sum_old / old, (sums.sum(axis=0) - sum_old) / new
        mean = sums.sum(axis=0) / total
        # No variance of independent values between 0 and 1 is larger than that of 0s and 1s.
        variance = np.maximum(mean * (1 - mean), self._noise.variance())
        values = self._block * old * new / total
        log = math.log(2 * self._channels * max(1.0, math.log(total * self._block)) / self._delta)
        bound = np.sqrt(2 / values * variance * log) + 2 / (3 * values) * log
        # Of two shares that mirror each other the one that has grown is reported.
        excess = np.abs(mean_old - mean_new) / bound * np.where(mean_new > mean_old, 1, 1 - _TIE)
        place, channel = np.unravel_index(int(excess.argmax()), excess.shape)
        if excess[place, channel] <= 1:
            return None
        self._forget(int(places[place]) + 1)
        before, after = float(mean_old[place, channel]), float(mean_new[place, channel])
        return MeanChange(int(channel), before, after, int(new[place, 0]) * self._block)

    def _oldest_first(self) -> tuple[FloatArray, FloatArray]:
        """Give the blocks and the sums of all buckets."""
        levels = [*enumerate(self._levels)][::-1]
        sizes = [1 << level for level, buckets in levels for _ in buckets]
        return np.array(sizes), np.array([one for _, buckets in levels for one in buckets])

    def _forget(self, count: int) -> None:
        """Drop the oldest buckets."""
        for buckets in reversed(self._levels):
            gone = min(count, len(buckets))
            del buckets[:gone]
            count -= gone
        while len(self._levels) > 1 and not self._levels[-1]:
            self._levels.pop()


class RunNoise:
    """By how much means vary that follow each other, for runs of all lengths.

    Half the mean square of the difference of neighbours (the Allan variance), for stretches of 1,
    2, 4, 8 ... blocks: a change that happens once is one difference among many, and what comes and
    goes is in them all. What is learned here outlives a change.

    Parameters
    ----------
    channels : int
        How many means there are.
    block : int
        Values of one block.

    References
    ----------
    Allan, Statistics of atomic frequency standards, Proceedings of the IEEE 1966.

    Examples
    --------
    >>> noise = RunNoise(1, block=1)
    >>> for value in np.repeat(np.arange(64) % 2, 8):  # runs of eight
    ...     noise.add(np.array([float(value)]))
    >>> noise.variance().tolist()  # that of independent values were 0.25
    [4.0]
    """

    def __init__(self, channels: int, block: int) -> None:
        self._block, self._channels = block, channels
        self._last: list[FloatArray | None] = []
        """By length, the mean of the stretch before."""
        self._half: list[FloatArray | None] = []
        """The mean of the first half of a stretch whose second has not come."""
        self._counts: list[int] = []
        self._squares: list[FloatArray] = []

    def add(self, mean: FloatArray) -> None:
        """Take in the mean of one block."""
        level = 0
        while level < _LEVELS:
            if level == len(self._counts):
                self._last.append(None)
                self._half.append(None)
                self._counts.append(0)
                self._squares.append(np.zeros(self._channels))
            if (last := self._last[level]) is not None:
                self._counts[level] = min(self._counts[level] + 1, _REMEMBERED)
                off = (mean - last) ** 2 / 2 - self._squares[level]
                self._squares[level] = self._squares[level] + off / self._counts[level]
            self._last[level] = mean
            half, self._half[level] = self._half[level], None
            if half is None:
                self._half[level] = mean
                return
            mean, level = (half + mean) / 2, level + 1

    def variance(self) -> FloatArray:
        """Give the variance of independent values whose means would vary as much, (K,)."""
        known = [
            squares * (self._block << level)
            for level, squares in enumerate(self._squares)
            if self._counts[level] >= _LEAST_DIFFERENCES
        ]
        return np.max(known, axis=0) if known else np.zeros(self._channels)


class PageHinkley:
    """Tells when the mean of a few numbers has fallen, by the sum of their deviations from it.

    Parameters
    ----------
    tolerance : float
        A fall below the mean that does not count.
    threshold : float
        The sum of what counts at which the mean has fallen.
    least : int
        Numbers before anything is reported.

    References
    ----------
    Page, Continuous inspection schemes, Biometrika 1954; Hinkley, Inference about the change-point
    from cumulative sum tests, Biometrika 1971.

    Examples
    --------
    >>> test = PageHinkley(tolerance=0.05, threshold=0.5, least=5)
    >>> [test.add(value) for value in [0.8] * 10 + [0.3] * 2]
    [False, False, False, False, False, False, False, False, False, False, False, True]
    """

    def __init__(self, tolerance: float, threshold: float, least: int) -> None:
        self._tolerance, self._threshold, self._least = tolerance, threshold, least
        self._reset()

    def _reset(self) -> None:
        self._count, self.mean, self._sum, self._lowest = 0, 0.0, 0.0, 0.0

    def add(self, value: float) -> bool:
        """Take in a number; True where it shows that the mean has fallen, and all begins anew."""
        self._count += 1
        self.mean += (value - self.mean) / self._count
        self._sum += self.mean - value - self._tolerance
        self._lowest = min(self._lowest, self._sum)
        if self._count < self._least or self._sum - self._lowest <= self._threshold:
            return False
        self._reset()
        return True
