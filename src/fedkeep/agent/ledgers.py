"""Small state that is committed with the samples: what was counted, and what was erased."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from fedkeep.core.types import State

REMEMBERED = 512


class CounterBook(Counter[str]):
    """Counts by name since the store was made."""

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in sorted(self.items()) if count}

    def snapshot(self) -> State:
        return {"json": np.frombuffer(json.dumps(self.counts()).encode(), dtype=np.uint8)}

    def restore(self, state: State) -> None:
        self.clear()
        self.update(json.loads(state["json"].tobytes()))


class ModelDate:
    """Of which round the present model and g_hat are, and when they came by the age clock."""

    def __init__(self) -> None:
        self.round = -1
        self.received: float | None = None

    def snapshot(self) -> State:
        return {"date": np.array([self.round, np.nan if self.received is None else self.received])}

    def restore(self, state: State) -> None:
        round_, received = state["date"].tolist()
        self.round, self.received = int(round_), None if np.isnan(received) else received


class Tombstones:
    """The ids that were erased last, and nothing else of them: what is sent again is refused."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self.ids: frozenset[int] = frozenset()

    def add(self, ids: Iterable[int]) -> None:
        self._ids = list(dict.fromkeys([*self._ids, *ids]))[-REMEMBERED:]
        self.ids = frozenset(self._ids)

    def snapshot(self) -> State:
        return {"ids": np.array(self._ids, dtype=np.int64)}

    def restore(self, state: State) -> None:
        self._ids = []
        self.add(state["ids"].tolist())


DAY = 86_400.0


def _boot_name() -> str:
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else ""


class AgeClock:
    """Seconds of the agent's life, as far as they are sure to have passed."""

    def __init__(
        self,
        tolerance: float = DAY,
        wall: Callable[[], float] = time.time,
        boot: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME),
        boot_name: Callable[[], str] = _boot_name,
    ) -> None:
        self._tolerance, self.wall, self._boot = tolerance, wall, boot
        """`wall` is what the device takes for the time of day; for people to read."""
        self._boot_name = boot_name()
        self._age_at_start, self._start = 0.0, boot()

    def now(self) -> float:
        """The age; it never goes back."""
        return self._age_at_start + max(0.0, self._boot() - self._start)

    def snapshot(self) -> State:
        return {"seconds": np.array([self.now(), self.wall(), self._boot()]), "boot": np.array(self._boot_name)}

    def restore(self, state: State) -> None:
        """Goes on from where an earlier process stopped, with the time in between as far as it is sure."""
        age, wall, boot = state["seconds"].tolist()
        if self._boot_name and str(state["boot"]) == self._boot_name:
            between = self._boot() - boot
        else:
            between = self.wall() - wall - self._tolerance
        self._age_at_start = age + max(0.0, between)
        self._start = self._boot()
