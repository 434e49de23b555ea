"""Why a sample is stored, or is not: a bounded log of decisions."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fedkeep.agent.record import Note
from fedkeep.core.ports import Fate
from fedkeep.core.types import Batch, IntArray, Scores, State
from fedkeep.link.messages import Reason

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
        self._written = 0
        self._refusals = 0
        self.policy = policy
        self._policy = policy.encode()[:16]

    def add(self, note: Note, verdict: Verdict) -> None:
        self._rows[self._written % len(self._rows)] = (
            note.id, note.arrival, note.label, verdict, note.score, note.floor, note.displaced, note.model_version,
            note.wall, self._policy,
        )  # fmt: skip
        self._written += 1

    def add_refusals(
        self, batch: Batch, arrivals: IntArray, scores: Scores, floors: Scores, model_version: int, wall: float
    ) -> None:
        keep = slice(-len(self._refused), None)
        rows = np.zeros(len(batch.ids[keep]), dtype=_ROW)
        columns = {"id": batch.ids, "arrival": arrivals, "label": batch.y, "score": scores, "floor": floors}
        for name, values in columns.items():
            rows[name] = values[keep]
        rows["displaced"], rows["model"], rows["wall"], rows["policy"] = -1, model_version, wall, self._policy
        self._refused[(self._refusals + np.arange(len(rows))) % len(self._refused)] = rows
        self._refusals += len(rows)

    def about(self, id_: int) -> list[Reason]:
        """All decisions on one sample that are still logged, oldest first, the one that displaced it included."""
        rows = np.concatenate([self._refused, self._rows])
        # A row without a policy was never written.
        found = rows[((rows["id"] == id_) | (rows["displaced"] == id_)) & (rows["policy"] != b"")]
        found = np.sort(found, order=("wall", "arrival"), kind="stable")
        return [
            Reason(
                id=known,
                verdict=Verdict(verdict).name.lower(),
                label=label,
                score=None if np.isnan(score) else score,
                floor=None if np.isnan(floor) else floor,
                displaced=None if displaced < 0 else displaced,
                model_version=model,
                policy=policy.decode(),
                time=wall,
            )
            for known, _, label, verdict, score, floor, displaced, model, wall, policy in found.tolist()
        ]

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
