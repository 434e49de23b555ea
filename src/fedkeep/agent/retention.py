"""What bounds how long a sample is kept and keeps it away once it is gone.

The age clock, and the erased ids.

Both are small states that are committed with the samples.
"""

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.types import ArraySpec, FloatArray, State, StateSpec

DAY = 86_400.0
_HOUR = 3600.0
_STEP_SECONDS = 60.0
"""A wall clock that moves by more than this against the boot-time clock was set."""
_STEPS = 32
"""Corrections that are remembered.

The oldest two become one, which may only make samples look younger.
"""
_EARLIEST_WALL = 1_735_689_600.0
"""2025-01-01: a wall clock that shows less was never set, and says nothing of an age."""


class AgeClock:
    """How old samples are, as far as it is certain.

    Two lower bounds of an age, of which the larger counts:

    - seconds of the boot-time clock, which nobody can set, and over a reboot those of the wall
    clock less `tolerance`;
    - the sample's own wall time against the present one, less `tolerance` once, however many
    reboots lie between.

    A wall clock that is set while the device runs corrects the wall times of samples that came
    before in the same boot. If it was set by more than `tolerance`, it counts once it has stayed so
    for an hour.

    Parameters
    ----------
    tolerance
        Seconds by which the wall clock's errors at two times may differ.
    wall, boot
        The time of day, and the seconds since the device was switched on, sleep included.
    boot_id
        A file that names the present boot.

    Examples
    --------
    >>> wall, boot = [1.8e9], [50.0]
    >>> clock = AgeClock(DAY, lambda: wall[0], lambda: boot[0], Path("/nowhere"))
    >>> taken, at = clock.now(), clock.wall()
    >>> wall[0], boot[0] = wall[0] + 3 * DAY, boot[0] + 3 * DAY
    >>> clock.age(taken, at) / DAY
    3.0
    """

    def __init__(
        self,
        tolerance: float = DAY,
        wall: Callable[[], float] = time.time,
        boot: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME),
        boot_id: Path = Path("/proc/sys/kernel/random/boot_id"),
    ) -> None:
        self._tolerance, self.wall, self._boot = tolerance, wall, boot
        """`wall` is what the device takes for the time of day; for people to read."""
        self._boot_name = boot_id.read_text().strip() if boot_id.exists() else ""
        self._age_at_start, self._start = 0.0, boot()
        self._boot_began = 0.0
        """The age when this boot was first seen."""
        self._offset = wall() - self._start
        self._doubted_until = -np.inf
        """By the boot-time clock: until then the wall clock says nothing of an age."""
        self._steps: FloatArray = np.zeros((0, 3))
        """Ages from and to which samples were taken, and by how much their wall times are to be
        moved.
        """

    def now(self) -> float:
        """Return the age; it never goes back."""
        return self._age_at_start + max(0.0, self._boot() - self._start)

    def look(self) -> None:
        """Notice whether the wall clock was set; to be called now and then."""
        boot = self._boot()
        moved = self.wall() - boot - self._offset
        if abs(moved) <= _STEP_SECONDS:
            return
        age, steps = self.now(), self._steps
        own = steps[:, 0] >= self._boot_began
        steps[own, 2] += moved
        begun = steps[own, 1].max(initial=self._boot_began)
        self._steps = _at_most(np.vstack([steps, [begun, age, moved]]), _STEPS)
        self._offset += moved
        if abs(moved) > self._tolerance:
            self._doubted_until = boot + _HOUR

    def age(self, taken: float, wall: float) -> float:
        """Return for how many seconds a sample has certainly been there, stored at these times.

        Parameters
        ----------
        taken
            The age at which it was stored, as `now` had it.
        wall
            The wall clock's time then.
        """
        since, present = self.now() - taken, self.wall()
        wall += self._correction(taken)
        if min(present, wall) < _EARLIEST_WALL or self._boot() < self._doubted_until:
            return since
        return max(since, present - wall - self._tolerance)

    def _correction(self, taken: float) -> float:
        """By how much the wall times of samples stored at this age are to be moved.

        Ages on the disk are rounded up to whole seconds: near the border of two stretches the one
        counts that makes a sample younger.
        """
        begun, ended, moved = self._steps.T
        near = (begun <= taken) & (taken <= ended + 1)
        within = (begun + 1 <= taken) & (taken < ended)
        return float(moved[near].max(initial=-np.inf if within.any() else 0.0))

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`; the boot's name may be of any length."""
        return {
            # A version before had the first three alone.
            "seconds": ArraySpec((5,), np.float64, bounded=True),
            "boot*": ArraySpec((36,), "U1"),
            "steps": ArraySpec((_STEPS, 3), np.float64, bounded=True, optional=True),
        }

    def snapshot(self) -> State:
        """Return the state as arrays."""
        seconds = np.array(
            [self.now(), self.wall(), self._boot(), self._boot_began, self._doubted_until]
        )
        return {
            "seconds": seconds,
            "boot": np.array(self._boot_name),
            "steps": self._steps.copy(),
        }

    def restore(self, state: State) -> None:
        """Go on from where an earlier process stopped.

        The time in between counts as far as it is sure.
        """
        age, wall, boot, *rest = state["seconds"].tolist()
        self._steps = np.array(state.get("steps", np.zeros((0, 3))), dtype=np.float64)
        same_boot = self._boot_name and str(state["boot"]) == self._boot_name
        between = self._boot() - boot if same_boot else self.wall() - wall - self._tolerance
        self._age_at_start = age + max(0.0, between)
        self._start = self._boot()
        self._offset = self.wall() - self._start
        self._boot_began, self._doubted_until = self._age_at_start, -np.inf
        if same_boot:
            self._boot_began, self._doubted_until = rest or (0.0, -np.inf)
            self._offset = wall - boot
            self.look()


def _at_most(steps: FloatArray, count: int) -> FloatArray:
    """Return the same corrections with the two oldest made one while there are too many."""
    while len(steps) > count:
        joined = [[steps[0, 0], steps[1, 1], steps[:2, 2].max()]]
        steps = np.vstack([joined, steps[2:]])
    return steps


EXACT = 512
"""Ids that were erased last and are kept as they are."""
_ID_BYTES, _MARK_BYTES, _KEY_BYTES = 8, 4, 16


class ErasedIds:
    """The ids that were erased, and nothing else of them: what is sent again is refused.

    The latest are kept as they are; those before as marks of 32 bits under a key of the store's
    own, so that of n marks one refuses a sample that was never erased with probability n / 2^32.
    Beyond `nbytes` the oldest are forgotten.

    Parameters
    ----------
    nbytes
        What ids and marks may take.

    Examples
    --------
    >>> erased = ErasedIds(nbytes=4096 + 8)
    >>> erased.add(range(514))  # none is forgotten
    0
    >>> 513 in erased, 0 in erased, 514 in erased, erased.capacity
    (True, True, False, 514)
    >>> erased.add([900])  # one too many
    1
    >>> 0 in erased, 1 in erased
    (False, True)
    """

    def __init__(self, nbytes: int = _ID_BYTES * EXACT) -> None:
        self._exact = min(EXACT, nbytes // _ID_BYTES)
        self._most = max(0, nbytes - _ID_BYTES * EXACT) // _MARK_BYTES
        self._key = os.urandom(_KEY_BYTES)
        self.ids: dict[int, None] = {}
        self._marks: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        """Oldest first."""
        self._sorted = self._marks

    @property
    def capacity(self) -> int:
        """Ids that are remembered."""
        return self._exact + self._most

    def add(self, ids: Iterable[int]) -> int:
        """Remember these ids as well; returns how many of the oldest are no longer remembered."""
        new = dict.fromkeys(ids)
        kept = [id_ for id_ in self.ids if id_ not in new]
        known = [*kept, *new]
        split = max(0, len(known) - self._exact)
        older, exact = known[:split], known[split:]
        self.ids = dict.fromkeys(exact)
        fresh = np.array([self._mark(id_) for id_ in older], dtype=np.uint32)
        marks = np.concatenate([self._marks[~np.isin(self._marks, fresh)], fresh])
        lost = max(0, len(marks) - self._most)
        self._keep(marks[lost:])
        return lost

    def __contains__(self, id_: object) -> bool:
        if id_ in self.ids:
            return True
        if not len(self._sorted) or not isinstance(id_, int):
            return False
        mark = self._mark(id_)
        place = int(np.searchsorted(self._sorted, mark))
        return place < len(self._sorted) and bool(self._sorted[place] == mark)

    def __len__(self) -> int:
        return len(self.ids) + len(self._marks)

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`; another `nbytes` may have left more of them."""
        return {
            "ids*": ArraySpec((self._exact,), np.int64),
            "marks*": ArraySpec((self._most,), np.uint32),
            "key": ArraySpec((_KEY_BYTES,), np.uint8, optional=True),
        }

    def snapshot(self) -> State:
        """Return the state as arrays."""
        return {
            "ids": np.array(list(self.ids), dtype=np.int64),
            "marks": self._marks.copy(),
            "key": np.frombuffer(self._key, dtype=np.uint8),
        }

    def restore(self, state: State) -> None:
        """Become what `snapshot` described, or what a version before did."""
        ids = state["ids"].tolist()
        if "key" in state:
            self._key = state["key"].tobytes()
        self._keep(np.array(state.get("marks", ()), dtype=np.uint32)[-self._most or 0 :])
        self.ids = {}
        self.add(ids)

    def _keep(self, marks: NDArray[np.uint32]) -> None:
        self._marks = marks if self._most else marks[:0]
        self._sorted = np.sort(self._marks)

    def _mark(self, id_: int) -> int:
        digest = blake2b(id_.to_bytes(8, "little"), key=self._key, digest_size=_MARK_BYTES).digest()
        return int.from_bytes(digest, "little")
