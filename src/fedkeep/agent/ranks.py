"""Where stored samples stand: scores and uses that changed since their records were written, in small arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedkeep.agent.record import Note
from fedkeep.core.types import AnyArray, State

_BUCKET = 64
"""Ranks are written in buckets of about this many samples, so that a renewed score costs few bytes."""
_RANK = np.dtype(
    [("ids", "<i8"), ("scores", "<f8"), ("arrivals", "<i8"), ("uses", "<i4"), ("tiers", "<i4"), ("effective", "<f8")]
)
RANK_BYTES = _RANK.itemsize
COLUMNS = _RANK.names or ()
_FLOATS = ("scores", "effective")
_PREFIX = "ranks."
_RANKED = 1
"""The tier of a sample that nothing but its score moves; as in `MemoryStore.snapshot`."""


class Ranks:
    """The arrays as they stand in the file, and the samples of which they no longer tell the truth."""

    def __init__(self, capacity: int) -> None:
        self._buckets = max(1, -(-capacity // _BUCKET))
        self._changed: set[int] | None = set()
        """Samples whose rank differs from what is written; None stands for all."""
        self.arrays: State = {}

    def load(self, state: State) -> State:
        """Takes its own arrays out of a file's state and returns the others."""
        self.arrays = {name: array for name, array in state.items() if name.startswith(_PREFIX)}
        self._changed = set()
        return {name: array for name, array in state.items() if name not in self.arrays}

    def touch(self, id_: int) -> None:
        if self._changed is not None:
            self._changed.add(id_)

    def touch_all(self) -> None:
        self._changed = None

    def forget(self, id_: int) -> None:
        if self._changed is not None:
            self._changed.discard(id_)

    @property
    def stale(self) -> bool:
        return self._changed is None or bool(self._changed)

    def update(self, state: State) -> None:
        """Brings the arrays up to date with the snapshot of a `MemoryStore`."""
        written = self._changed if self._changed is not None else set(state["ids"].tolist())
        known = {int(id_) for array in self.arrays.values() for id_ in array["ids"]}
        keep = np.isin(state["ids"], np.array(sorted(known | written), dtype=np.int64))
        rows = np.zeros(int(keep.sum()), dtype=_RANK)
        for name in COLUMNS:
            rows[name] = state[name][keep]
        buckets = rows["ids"] % self._buckets
        changed = {id_ % self._buckets for id_ in written}
        for bucket in range(self._buckets) if self._changed is None else changed:
            self.arrays[f"{_PREFIX}{bucket}"] = rows[buckets == bucket]
        self.arrays = {name: array for name, array in self.arrays.items() if len(array)}
        self._changed = set()

    def columns(self, notes: Iterable[Note]) -> dict[str, AnyArray]:
        """The ranks of these samples, by arrival: as written here, or as their records have it."""
        ranks = {int(row["ids"]): row for array in self.arrays.values() for row in array}
        rows = sorted((_row(note, ranks.get(note.id)) for note in notes), key=lambda row: row[2])
        columns = zip(*rows, strict=True) if rows else [[] for _ in COLUMNS]
        return {
            name: np.array(column, dtype=np.float64 if name in _FLOATS else np.int64)
            for name, column in zip(COLUMNS, columns, strict=True)
        }


def _row(note: Note, rank: AnyArray | None) -> tuple[Any, ...]:
    """A rank counts unless it is of an earlier stay of the same sample."""
    if rank is not None and rank["arrivals"] >= note.arrival:
        return tuple(rank[name] for name in COLUMNS)
    return note.id, note.score, note.arrival, note.uses, _RANKED, note.score
