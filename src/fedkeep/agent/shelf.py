"""Named arrays in the store's file, of which a commit writes only those that changed."""

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np

from fedkeep.agent.cellfile import Blob
from fedkeep.agent.cells import FAR
from fedkeep.agent.record import Note, decode_array, encode_array
from fedkeep.core.types import AnyArray, State

ARRAY = 2
PACK = 3
_ARRAYS = (ARRAY, PACK, FAR)
_SMALL = 256
"""Arrays of at most this many bytes share one blob: a cell each would waste most of it."""
_PACK_NAME = ""
APART = "apart."
"""How the names of arrays begin that are kept twice, far from each other: one of them must outlive the other."""
_LENGTH = struct.Struct("<I")


class Shelf:
    """Knows which blob holds which array, and what was last written there."""

    def __init__(self) -> None:
        self._blobs: dict[str, int] = {}
        self._digests: dict[str, bytes] = {}
        self._stale: list[int] = []

    def load(self, blobs: list[Blob]) -> State:
        """The newest array of each name; what was known before is forgotten."""
        self._stale = sorted(older_arrays(blobs))
        newest = {_name(b): b for b in blobs if b.kind in _ARRAYS and b.number not in self._stale}
        self._blobs = {name: blob.number for name, blob in newest.items()}
        self._digests = {name: _digest(blob.data) for name, blob in newest.items()}
        pack = newest.pop(_PACK_NAME, None)
        state = dict(decode_array(blob.data) for blob in newest.values())
        return {**(_unpack(pack.data) if pack else {}), **state}

    def changes(self, state: State) -> tuple[dict[str, tuple[int, bytes]], list[int]]:
        """The blobs that a commit of `state` must write, by name, and the blobs that it makes obsolete."""
        small = {name: array for name, array in state.items() if _is_small(name, array)}
        changed: dict[str, tuple[int, bytes]] = {}
        pack = b"".join(_with_length(encode_array(name, array)) for name, array in sorted(small.items()))
        if self._digests.get(_PACK_NAME) != _digest(pack):
            changed[_PACK_NAME] = (PACK, pack)
        for name, array in state.items():
            data = b"" if name in small else encode_array(name, array)
            if data and self._digests.get(name) != _digest(data):
                changed[name] = (FAR if name.startswith(f"{APART}1") else ARRAY, data)
        large = state.keys() - small.keys()
        gone = [name for name in self._blobs if name in changed or (name and name not in large)]
        return changed, [*self._stale, *(self._blobs[name] for name in gone)]

    def committed(self, state: State, changed: dict[str, tuple[int, bytes]], numbers: list[int]) -> None:
        """Takes note of a commit that succeeded; `numbers` are the new blobs, in the order of `changed`."""
        self._stale.clear()
        self._blobs.update(zip(changed, numbers, strict=True))
        self._digests.update((name, _digest(data)) for name, (_, data) in changed.items())
        large = {name for name, array in state.items() if not _is_small(name, array)} | {_PACK_NAME}
        self._blobs = {name: number for name, number in self._blobs.items() if name in large}
        self._digests = {name: digest for name, digest in self._digests.items() if name in large}


def _is_small(name: str, array: AnyArray) -> bool:
    return array.nbytes <= _SMALL and not name.startswith(APART)


def older_arrays(blobs: list[Blob]) -> set[int]:
    """The numbers of arrays of which there is a newer one of the same name."""
    newest: dict[str, int] = {}
    gone: set[int] = set()
    for number, name in sorted((blob.number, _name(blob)) for blob in blobs if blob.kind in _ARRAYS):
        if name in newest:
            gone.add(newest[name])
        newest[name] = number
    return gone


def _name(blob: Blob) -> str:
    return _PACK_NAME if blob.kind == PACK else decode_array(blob.data)[0]


def _with_length(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _unpack(pack: bytes) -> State:
    state: State = {}
    start = 0
    while start < len(pack):
        (length,) = _LENGTH.unpack_from(pack, start)
        start += _LENGTH.size + length
        name, array = decode_array(pack[start - length : start])
        state[name] = array
    return state


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


_BUCKET = 64
"""Ranks are written in buckets of about this many samples, so that a renewed score costs few bytes."""
_RANK = np.dtype([("ids", "<i8"), ("scores", "<f8"), ("arrivals", "<i8"), ("uses", "<i4"), ("tiers", "i1")])
_DISCOUNTED = np.dtype([*_RANK.descr, ("effective", "<f8")])
"""Where the score that counts is not the sample's own: `after_use` is `discount`."""
COLUMNS = _DISCOUNTED.names or ()
_FLOATS = ("scores", "effective")
_PREFIX = "ranks."
_RANKED = 1
"""The tier of a sample that nothing but its score moves; as in `MemoryStore.snapshot`."""


def rank_bytes(*, discounts: bool) -> int:
    """Of one sample."""
    return (_DISCOUNTED if discounts else _RANK).itemsize


class Ranks:
    """The ranks that are no longer as the samples' records have them, as arrays in the file."""

    def __init__(self, capacity: int, *, discounts: bool) -> None:
        self._buckets = max(1, -(-capacity // _BUCKET))
        self._dtype = _DISCOUNTED if discounts else _RANK
        self.arrays: State = {}

    def load(self, state: State) -> State:
        """Takes its own arrays out of a file's state and returns the others."""
        self.arrays = {name: array for name, array in state.items() if name.startswith(_PREFIX)}
        return {name: array for name, array in state.items() if name not in self.arrays}

    def update(self, ranks: dict[str, AnyArray], notes: dict[int, Note]) -> None:
        """Brings the arrays up to date with the ranks of a `MemoryStore`."""
        recorded = [notes[id_] for id_ in ranks["ids"].tolist()]
        differ = (ranks["uses"] > 0) | (ranks["tiers"] != _RANKED) | (ranks["effective"] != ranks["scores"])
        differ |= ranks["scores"] != np.array([note.score for note in recorded])
        differ |= ranks["arrivals"] != np.array([note.arrival for note in recorded])
        rows = np.zeros(int(differ.sum()), dtype=self._dtype)
        for name in self._dtype.names or ():
            rows[name] = ranks[name][differ]
        buckets = rows["ids"] % self._buckets
        self.arrays = {f"{_PREFIX}{bucket}": rows[buckets == bucket] for bucket in np.unique(buckets).tolist()}

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
        return tuple(rank["scores" if name not in (rank.dtype.names or ()) else name] for name in COLUMNS)
    return note.id, note.score, note.arrival, note.uses, _RANKED, note.score
