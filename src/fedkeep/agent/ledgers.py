"""Small state that is committed with the samples: what was counted, erased and decided, and how old it is."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkeep.agent.record import Note
from fedkeep.core.ports import Fate, Outcome
from fedkeep.core.types import Batch, IntArray, State
from fedkeep.link.messages import Reason

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


@dataclass
class ModelDate:
    """Of which round the present model and g_hat are, and when they came by the age clock."""

    round: int = -1
    received: float | None = None

    def snapshot(self) -> State:
        return {"date": np.array([self.round, self.received], dtype=np.float64)}  # None becomes NaN

    def restore(self, state: State) -> None:
        round_, received = state["date"].tolist()
        self.round, self.received = int(round_), None if np.isnan(received) else received


class Tombstones:
    """The ids that were erased last, and nothing else of them: what is sent again is refused."""

    def __init__(self) -> None:
        self.ids: dict[int, None] = {}

    def add(self, ids: Iterable[int]) -> None:
        self.ids = dict.fromkeys(list(dict.fromkeys([*self.ids, *ids]))[-REMEMBERED:])

    def snapshot(self) -> State:
        return {"ids": np.array(list(self.ids), dtype=np.int64)}

    def restore(self, state: State) -> None:
        self.ids = dict.fromkeys(state["ids"].tolist())


DAY = 86_400.0


class AgeClock:
    """Seconds of the agent's life, as far as they are sure to have passed."""

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

    def now(self) -> float:
        """The age; it never goes back."""
        return self._age_at_start + max(0.0, self._boot() - self._start)

    def snapshot(self) -> State:
        seconds = np.array([self.now(), self.wall(), self._boot()])
        return {"seconds": seconds, "boot": np.array(self._boot_name)}

    def restore(self, state: State) -> None:
        """Goes on from where an earlier process stopped, with the time in between as far as it is sure."""
        age, wall, boot = state["seconds"].tolist()
        same_boot = self._boot_name and str(state["boot"]) == self._boot_name
        between = self._boot() - boot if same_boot else self.wall() - wall - self._tolerance
        self._age_at_start = age + max(0.0, between)
        self._start = self._boot()


CHUNK = 32
"""Decisions that are written together."""
_ROW = np.dtype(
    [
        ("id", "<i8"), ("arrival", "<i8"), ("label", "<i4"), ("verdict", "<i4"), ("score", "<f8"), ("floor", "<f8"),
        ("displaced", "<i8"), ("model", "<i8"), ("wall", "<f8"), ("policy", "S16"),
    ]
)  # fmt: skip
ROW_BYTES = _ROW.itemsize


class Verdict(IntEnum):
    """A sample's fate on arrival, or how it left."""

    REFUSED = Fate.REFUSED
    KEPT = Fate.KEPT
    REPLACED = Fate.REPLACED
    REFRESHED = Fate.REFRESHED
    ERASED = 10
    """On request; nothing else of the sample is left, here or elsewhere."""
    EXPIRED = 11
    DROPPED = 12
    """It no longer fitted the quotas, or its new score ruled it out."""


class DecisionLog:
    """The latest `length` decisions that changed the store, kept on disk, and as many refusals, kept in memory.

    Refusals are most of a stream; writing each to flash would cost more than the samples themselves.
    """

    def __init__(self, length: int, policy: str) -> None:
        self._rows: NDArray[np.void] = np.zeros(max(1, -(-length // CHUNK)) * CHUNK, dtype=_ROW)
        self._refused = self._rows.copy()
        self._written = self._refusals = 0
        self.policy, self._policy = policy, policy.encode()[:16]

    def add(self, note: Note, verdict: Verdict) -> None:
        self._rows[self._written % len(self._rows)] = (
            note.id, note.arrival, note.label, verdict, note.score, note.floor, note.displaced, note.model_version,
            note.wall, self._policy,
        )  # fmt: skip
        self._written += 1

    def add_refusals(self, batch: Batch, arrivals: IntArray, outcome: Outcome, model: int, wall: float) -> None:
        refused = np.flatnonzero(outcome.fates == Fate.REFUSED)[-len(self._refused) :]
        rows = np.zeros(len(refused), dtype=_ROW)
        columns = (batch.ids, arrivals, batch.y, outcome.scores, outcome.floors)
        for name, values in zip(("id", "arrival", "label", "score", "floor"), columns, strict=True):
            rows[name] = values[refused]
        rows["displaced"], rows["model"], rows["wall"], rows["policy"] = -1, model, wall, self._policy
        self._refused[(self._refusals + np.arange(len(rows))) % len(self._refused)] = rows
        self._refusals += len(rows)

    def about(self, id_: int) -> list[Reason]:
        """All decisions on one sample that are still logged, oldest first, the one that displaced it included."""
        rows = np.concatenate([self._refused, self._rows])
        # A row without a policy was never written.
        found = rows[((rows["id"] == id_) | (rows["displaced"] == id_)) & (rows["policy"] != b"")]
        found = np.sort(found, order=("wall", "arrival"), kind="stable")
        reasons = []
        for known, _, label, verdict, *scores, displaced, model, wall, policy in found.tolist():
            score, floor = (None if np.isnan(value) else value for value in scores)
            gone = None if displaced < 0 else displaced
            name = Verdict(verdict).name.lower()
            reasons.append(Reason(known, name, label, score, floor, gone, model, policy.decode(), wall))
        return reasons

    def forget(self, ids: IntArray) -> None:
        """Leaves no trace of these samples' labels and values."""
        for rows in (self._rows, self._refused):
            rows[np.isin(rows["id"], ids)] = np.zeros((), dtype=_ROW)
            rows["displaced"][np.isin(rows["displaced"], ids)] = -1

    def snapshot(self) -> State:
        """In chunks, of which a commit writes those that changed."""
        chunks = {str(i): self._rows[i * CHUNK : (i + 1) * CHUNK] for i in range(len(self._rows) // CHUNK)}
        return {"written": np.array(self._written), **chunks}

    def restore(self, state: State) -> None:
        for name, own in self.snapshot().items():
            chunk = state.get(name)
            if chunk is not None and chunk.dtype == _ROW and len(chunk) == CHUNK:
                own[:] = chunk
        self._written = int(state.get("written", 0))
