"""Named arrays in the store's file, of which a commit writes only those that changed."""

import struct
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from fedkeep.agent.cellfile import Blob
from fedkeep.agent.cells import FAR
from fedkeep.agent.record import SAMPLE, Note, decode_array, decode_note, encode_array
from fedkeep.core.types import AnyArray, State

ARRAY = 2
PACK = 3
_PACK_NAME = ""
_SMALL = 256
"""Arrays of at most this many bytes share one blob: a cell each would waste most of it."""
APART = "apart."
"""How the names of arrays begin that are kept twice, far from each other: one of them must outlive the other."""
_LENGTH = struct.Struct("<I")


def newest_of(blobs: list[Blob]) -> dict[int | str, Blob]:
    """The newest blob of each sample, by its id, and of each array, by its name."""

    def name(blob: Blob) -> int | str:
        if blob.kind == SAMPLE:
            return decode_note(blob).id
        return _PACK_NAME if blob.kind == PACK else decode_array(blob.data)[0]

    return {name(blob): blob for blob in sorted(blobs)}


class Shelf:
    """Knows which blob holds which array, and what was last written there."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[int, bytes]] = {}
        """By name, the number of the blob and a digest of its bytes."""
        self._stale: list[int] = []

    def load(self, blobs: list[Blob]) -> State:
        """The newest array of each name; what was known before is forgotten."""
        arrays = [blob for blob in blobs if blob.kind != SAMPLE]
        newest = {str(name): blob for name, blob in newest_of(arrays).items()}
        self._written = {name: (blob.number, _digest(blob.data)) for name, blob in newest.items()}
        current = {blob.number for blob in newest.values()}
        self._stale = [blob.number for blob in arrays if blob.number not in current]
        state: State = {}
        pack, start = newest.pop(_PACK_NAME).data if _PACK_NAME in newest else b"", 0
        while start < len(pack):
            (length,) = _LENGTH.unpack_from(pack, start)
            start += _LENGTH.size + length
            name, array = decode_array(pack[start - length : start])
            state[name] = array
        return state | dict(decode_array(blob.data) for blob in newest.values())

    def changes(self, state: State) -> tuple[dict[str, tuple[int, bytes]], list[int]]:
        """The blobs that a commit of `state` must write, by name, and the blobs that it makes obsolete."""
        encoded = {name: encode_array(name, array) for name, array in state.items()}
        small = [name for name in sorted(state) if state[name].nbytes <= _SMALL and not name.startswith(APART)]
        pack = b"".join(_LENGTH.pack(len(data)) + data for data in map(encoded.pop, small))
        blobs = {_PACK_NAME: (PACK, pack)}
        blobs |= {name: (FAR if name.startswith(f"{APART}1") else ARRAY, data) for name, data in encoded.items()}
        known = {name: digest for name, (_, digest) in self._written.items()}
        changed = {name: blob for name, blob in blobs.items() if known.get(name) != _digest(blob[1])}
        gone = [number for name, (number, _) in self._written.items() if name in changed or name not in blobs]
        return changed, [*self._stale, *gone]

    def committed(self, changed: dict[str, tuple[int, bytes]], obsolete: list[int], numbers: list[int]) -> None:
        """Takes note of a commit that succeeded; `numbers` are the new blobs, in the order of `changed`."""
        self._stale.clear()
        self._written = {name: place for name, place in self._written.items() if place[0] not in obsolete}
        for (name, (_, data)), number in zip(changed.items(), numbers, strict=True):
            self._written[name] = (number, _digest(data))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


_BUCKET = 64
"""Ranks are written in buckets of about this many samples, so that a renewed score costs few bytes."""
_RANK = [("ids", "<i8"), ("scores", "<f8"), ("arrivals", "<i8"), ("uses", "<i4"), ("tiers", "i1")]
RANKS = {False: np.dtype(_RANK), True: np.dtype([*_RANK, ("effective", "<f8")])}
"""A rank, by whether the score that counts may not be the sample's own: where `after_use` is `discount`."""
COLUMNS = RANKS[True].names or ()
RANKS_PREFIX = "ranks."
_RANKED = 1
"""The tier of a sample that nothing but its score moves; as in `MemoryStore.snapshot`."""


def rank_arrays(ranks: dict[str, AnyArray], notes: dict[int, Note], capacity: int, *, discounts: bool) -> State:
    """The ranks of a `MemoryStore` that are no longer as the samples' records have them, as arrays for the file."""
    recorded = [notes[id_] for id_ in ranks["ids"].tolist()]
    differ = (ranks["uses"] > 0) | (ranks["tiers"] != _RANKED) | (ranks["effective"] != ranks["scores"])
    differ |= ranks["scores"] != np.array([note.score for note in recorded])
    differ |= ranks["arrivals"] != np.array([note.arrival for note in recorded])
    rows = np.zeros(int(differ.sum()), dtype=RANKS[discounts])
    for name in rows.dtype.names or ():
        rows[name] = ranks[name][differ]
    buckets = rows["ids"] % max(1, -(-capacity // _BUCKET))
    return {f"{RANKS_PREFIX}{bucket}": rows[buckets == bucket] for bucket in np.unique(buckets).tolist()}


def rank_columns(arrays: State, notes: Iterable[Note]) -> dict[str, AnyArray]:
    """The ranks of these samples, by arrival: as such arrays have them, or else their records."""
    ranks = {int(row["ids"]): row for array in arrays.values() for row in array}
    rows = []
    for note in notes:
        rank = ranks.get(note.id)
        if rank is not None and rank["arrivals"] >= note.arrival:  # else it is of an earlier stay of the sample
            rows.append((*rank.tolist(), rank["scores"])[: len(COLUMNS)])
        else:
            rows.append((note.id, note.score, note.arrival, note.uses, _RANKED, note.score))
    table = np.array(sorted(rows, key=lambda row: row[2]), dtype=RANKS[True])
    kinds = {"i": np.int64, "f": np.float64}
    return {name: table[name].astype(kinds[table[name].dtype.kind]) for name in COLUMNS}
