"""How a stored sample and an array of state become bytes, and come back."""

from __future__ import annotations

import json
import struct
from typing import NamedTuple

import numpy as np

from fedkeep.agent.cellfile import Blob
from fedkeep.core.types import AnyArray

SAMPLE = 1
SOURCE_BYTES = 32
_FIRST = struct.Struct("<qiiqdiidq")
"""Format 1: id, label, region, arrival, score, uses, model version, floor, displaced."""
_ADDED = struct.Struct("<dd32s")
"""What format 2 added: age clock, wall time, source."""
META_BYTES = _FIRST.size + _ADDED.size


class Note(NamedTuple):
    """All that is stored of a sample besides the sample itself."""

    id: int
    label: int
    region: int
    arrival: int
    score: float
    uses: int
    model_version: int
    floor: float
    """The score it had to beat when it came; NaN where there was room."""
    displaced: int
    """The id of the sample it replaced, -1 for none."""
    taken: float = 0.0
    """When it was stored, by the agent's own age clock (seconds); TTL counts from it."""
    wall: float = 0.0
    """When it was stored, by the device's wall clock, however wrong."""
    source: str = ""


def encode_sample(note: Note, content: bytes) -> bytes:
    """A record: the note, and the sample as its codec encoded it."""
    first = _FIRST.pack(
        note.id, note.label, note.region, note.arrival, note.score, note.uses, note.model_version, note.floor,
        note.displaced,
    )  # fmt: skip
    source = note.source.encode()[:SOURCE_BYTES]
    return first + _ADDED.pack(note.taken, note.wall, source) + content


def decode_note(blob: Blob) -> Note:
    """What is known of the sample of a record of any format."""
    first = _FIRST.unpack_from(blob.data)
    if blob.version == 1:
        return Note(*first)
    taken, wall, source = _ADDED.unpack_from(blob.data, _FIRST.size)
    return Note._make((*first, taken, wall, source.rstrip(b"\0").decode(errors="replace")))


def decode_sample(blob: Blob) -> tuple[Note, bytes]:
    """The parts of a record of any format."""
    return decode_note(blob), blob.data[_FIRST.size if blob.version == 1 else META_BYTES :]


def encode_array(name: str, array: AnyArray) -> bytes:
    """Any array of numbers or of fixed-width text, by name; Python objects are not arrays here."""
    array = np.asarray(array)
    if array.dtype.hasobject:
        raise TypeError(f"the state '{name}' holds Python objects, which cannot be stored")
    kind = array.dtype.descr if array.dtype.names else array.dtype.str
    head = json.dumps([name, kind, array.shape]).encode()
    return struct.pack("<I", len(head)) + head + array.tobytes()


def decode_array(data: bytes) -> tuple[str, AnyArray]:
    (length,) = struct.unpack_from("<I", data)
    name, kind, shape = json.loads(data[4 : 4 + length])
    dtype = np.dtype([tuple(part) for part in kind] if isinstance(kind, list) else kind)
    return name, np.frombuffer(data, dtype, offset=4 + length).reshape(shape).copy()
