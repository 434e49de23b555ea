"""When samples are committed.

Together, as late as their senders and a budget of bytes a day allow.
"""

import time
from collections.abc import Callable

import numpy as np

from fedkeep.agent.retention import DAY
from fedkeep.core.types import ArraySpec, State, StateSpec

_UNANSWERED = 300
"""Samples whose sender awaits no answer may wait this many times longer for a commit."""
_LONGEST_SECONDS = 60.0
_LATEST_ANSWER_SECONDS = 10.0
"""However little may be written, an answer comes by then."""
_BURST_SECONDS = 3600.0
"""What was not written in so much time may be written at once."""
_LEAST_BURST = 1 << 20
_WHOLE_SECONDS, _LATEST_WHOLE_SECONDS = 60.0, 600.0
"""How old the statistics on the disk may be while samples come fast, and at the most.

What a crash may cost of them.
"""
_AWAITED_WHOLE_SECONDS = 1.0
"""The same while a sender waits for them: at most so often, since they are many bytes."""
_SPENT_WHOLE_SECONDS = 3600.0
"""The same while the budget of bytes a day is spent."""
_FIRST_RETRY, _LAST_RETRY = 0.5, 10.0
"""Seconds after which a disk that took no write is tried again: twice as long each time."""
_WHOLE_SAMPLES = 256
"""Samples kept since the last whole commit that make another one due after the shorter of these
times.
"""


class CommitPacer:
    """Decides when a commit is due or tried again, and whether more may be written today.

    A budget of bytes a day is a bucket that fills evenly and holds an hour's share, a megabyte at
    the least. While it is in debt, commits wait as long as they may, and arrivals that would add to
    it stay in the queue. What must be written (erasures, what a server asks for, statistics) always
    is, and is paid back before samples are taken again.

    Parameters
    ----------
    commit_seconds
        How long a sender waits for an answer, where nothing else delays it.
    daily_writes
        Bytes a day; 0 for no limit.
    written
        The bytes handed to the file so far.
    clock
        Seconds that only grow.
    wall
        The time of day, by which a bucket fills from one process to the next.

    Examples
    --------
    >>> now, written = [0.0], [0]
    >>> pacer = CommitPacer(0.1, 24 << 20, lambda: written[0], lambda: now[0])
    >>> now[0] = 0.5
    >>> pacer.due(awaited=True), pacer.due(awaited=False)  # by then 30 seconds
    (True, False)
    >>> written[0] = 3 << 20  # two hours' share above what an hour may take at once
    >>> pacer.exhausted(), pacer.due(awaited=True)
    (True, False)
    >>> now[0] = 10.0
    >>> pacer.exhausted(), pacer.due(awaited=True)
    (True, True)
    >>> now[0] = 2.1 * 3600
    >>> pacer.exhausted()
    False
    """

    def __init__(
        self,
        commit_seconds: float,
        daily_writes: int,
        written: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._patience, self._rate = commit_seconds, daily_writes / DAY
        self._written, self._clock, self._wall = written, clock, wall
        self._burst = max(_LEAST_BURST, self._rate * _BURST_SECONDS)
        self._left, self._counted = self._burst, written()
        self._refilled = self._committed = self._whole = clock()
        self._kept = 0
        self._retry, self._pause = 0.0, _FIRST_RETRY

    def exhausted(self) -> bool:
        """Return whether as much was written as may be for now."""
        if not self._rate:
            return False
        self._refill()
        return self._left < 0

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        return {"bucket": ArraySpec((2,), np.float64)}

    def snapshot(self) -> State:
        """Return what a process that comes next may write.

        Its debts, or nothing: what was saved up is not passed on, since a process that is killed
        has no time to say that it was spent.
        """
        self._refill()
        return {"bucket": np.array([min(self._left, 0.0), self._wall()])}

    def restore(self, state: State) -> None:
        """Go on with the debts of an earlier process, as far as time has not paid them."""
        left, wall = state["bucket"].tolist()
        self._left = min(self._burst, left + max(0.0, self._wall() - wall) * self._rate)

    def _refill(self) -> None:
        now, written = self._clock(), self._written()
        self._left = min(self._burst, self._left + (now - self._refilled) * self._rate)
        self._left -= written - self._counted
        self._refilled, self._counted = now, written

    def due(self, *, awaited: bool) -> bool:
        """Return whether it is time for a commit.

        `awaited` says whether somebody waits for an answer.
        """
        patience = self._patience if awaited else self._patience * _UNANSWERED
        latest = _LATEST_ANSWER_SECONDS if awaited else _LONGEST_SECONDS
        if self.exhausted():
            patience = latest
        return self._clock() - self._committed >= min(patience, max(latest, self._patience))

    def whole_due(self, *, awaited: bool = False) -> bool:
        """Return whether the next commit is to write the statistics, too.

        `awaited` says whether somebody waits for what they hold.
        """
        age = self._clock() - self._whole
        if awaited:
            return age >= (_LATEST_ANSWER_SECONDS if self.exhausted() else _AWAITED_WHOLE_SECONDS)
        if self.exhausted():
            return age >= _SPENT_WHOLE_SECONDS
        least = _WHOLE_SECONDS if self._kept >= _WHOLE_SAMPLES else _LATEST_WHOLE_SECONDS
        return age >= least

    def retry_due(self) -> bool:
        """Return whether a disk that failed is to be tried again."""
        return self._clock() >= self._retry

    def committed(self, kept: int, *, whole: bool) -> None:
        """Take note of a commit of so many samples."""
        self._committed, self._pause = self._clock(), _FIRST_RETRY
        self._kept += kept
        if whole:
            self._whole, self._kept = self._committed, 0

    def failed(self) -> None:
        """Take note of a commit that the disk did not take."""
        self._retry = self._clock() + self._pause
        self._pause = min(2 * self._pause, _LAST_RETRY)
