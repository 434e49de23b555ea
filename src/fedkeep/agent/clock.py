"""A clock that only tells ages, so that a wrong wall clock cannot make a sample old before its time.

While the device stays up, ages grow by its boot-time clock, which nobody can set. Over a reboot only the wall clock
knows how long the device was off; it is believed except for `tolerance`. So a TTL never fires early as long as the
wall clock is wrong by no more than that, and after a reboot fires late by at most as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedkeep.core.types import State

DAY = 86_400.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_name() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


class AgeClock:
    """Seconds of the agent's life, as far as they are sure to have passed."""

    def __init__(
        self,
        tolerance: float = DAY,
        wall: Callable[[], float] = time.time,
        boot: Callable[[], float] = _boot_seconds,
        boot_name: Callable[[], str] = _boot_name,
    ) -> None:
        self._tolerance, self._wall, self._boot = tolerance, wall, boot
        self._boot_name = boot_name()
        self._age_at_start = 0.0
        self._start = boot()

    def now(self) -> float:
        """The age; it never goes back."""
        return self._age_at_start + max(0.0, self._boot() - self._start)

    def wall(self) -> float:
        """What the device takes for the time of day; for people to read."""
        return self._wall()

    def snapshot(self) -> State:
        return {"seconds": np.array([self.now(), self._wall(), self._boot()]), "boot": np.array(self._boot_name)}

    def restore(self, state: State) -> None:
        """Goes on from where an earlier process stopped, with the time in between as far as it is sure."""
        age, wall, boot = state["seconds"].tolist()
        if self._boot_name and str(state["boot"]) == self._boot_name:
            between = self._boot() - boot
        else:
            between = self._wall() - wall - self._tolerance
        self._age_at_start = age + max(0.0, between)
        self._start = self._boot()
