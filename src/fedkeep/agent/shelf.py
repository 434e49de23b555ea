"""Named arrays in the store's file, of which a commit writes only those that changed."""

from __future__ import annotations

import struct
from hashlib import blake2b

from fedkeep.agent.cellfile import Blob
from fedkeep.agent.record import decode_array, encode_array
from fedkeep.core.types import AnyArray, State

ARRAY = 2
PACK = 3
_SMALL = 256
"""Arrays of at most this many bytes share one blob: a cell each would waste most of it."""
_PACK_NAME = ""
_LENGTH = struct.Struct("<I")


class Shelf:
    """Knows which blob holds which array, and what was last written there."""

    def __init__(self) -> None:
        self._blobs: dict[str, int] = {}
        self._frozen: dict[str, AnyArray] = {}
        self._digests: dict[str, bytes] = {}
        self._stale: list[int] = []

    def load(self, blobs: list[Blob]) -> State:
        """The newest array of each name; what was known before is forgotten."""
        self._blobs, self._frozen, self._digests = {}, {}, {}
        self._stale = sorted(older_arrays(blobs))
        newest = {_name(b): b for b in blobs if b.kind in (ARRAY, PACK) and b.number not in self._stale}
        self._blobs = {name: blob.number for name, blob in newest.items()}
        self._digests = {name: _digest(blob.data) for name, blob in newest.items()}
        pack = newest.pop(_PACK_NAME, None)
        state = dict(decode_array(blob.data) for blob in newest.values())
        return {**(_unpack(pack.data) if pack else {}), **state}

    def changes(self, state: State) -> tuple[dict[str, tuple[int, bytes]], list[int]]:
        """The blobs that a commit of `state` must write, by name, and the blobs that it makes obsolete."""
        small = {name: array for name, array in state.items() if array.nbytes <= _SMALL}
        changed: dict[str, tuple[int, bytes]] = {}
        pack = b"".join(_with_length(encode_array(name, array)) for name, array in sorted(small.items()))
        if self._digests.get(_PACK_NAME) != _digest(pack):
            changed[_PACK_NAME] = (PACK, pack)
        for name, array in state.items():
            if name in small or self._frozen.get(name) is array:
                continue
            data = encode_array(name, array)
            if self._digests.get(name) != _digest(data):
                changed[name] = (ARRAY, data)
        large = state.keys() - small.keys()
        gone = [name for name in self._blobs if name in changed or (name and name not in large)]
        return changed, [*self._stale, *(self._blobs[name] for name in gone)]

    def committed(self, state: State, changed: dict[str, tuple[int, bytes]], numbers: list[int]) -> None:
        """Takes note of a commit that succeeded; `numbers` are the new blobs, in the order of `changed`."""
        self._stale.clear()
        self._blobs.update(zip(changed, numbers, strict=True))
        self._digests.update((name, _digest(data)) for name, (_, data) in changed.items())
        large = {name for name, array in state.items() if array.nbytes > _SMALL} | {_PACK_NAME}
        self._blobs = {name: number for name, number in self._blobs.items() if name in large}
        self._digests = {name: digest for name, digest in self._digests.items() if name in large}
        # What nobody may write to is unchanged as long as it is the same object; a large model is hashed only once.
        self._frozen = {name: array for name, array in state.items() if not array.flags.writeable}


def older_arrays(blobs: list[Blob]) -> set[int]:
    """The numbers of arrays of which there is a newer one of the same name."""
    newest: dict[str, int] = {}
    gone: set[int] = set()
    for number, name in sorted((blob.number, _name(blob)) for blob in blobs if blob.kind in (ARRAY, PACK)):
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
