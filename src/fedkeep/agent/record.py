"""How a stored sample and an array of state become bytes, and come back."""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedkeep.agent.cellfile import Blob
from fedkeep.core.encoding import EncodingName, SampleCodec
from fedkeep.core.types import AnyArray

SAMPLE = 1
_NOTE = struct.Struct("<qqdfqiiIdH")
"""Id, arrival, score, floor, displaced, label, model version, age in whole seconds, wall time, number of the source."""
META_BYTES = _NOTE.size


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


def encode_sample(note: Note, content: bytes, sources: list[str]) -> bytes:
    """A record: the note, and the sample as its codec encoded it.

    `sources` are the names that numbers stand for, the first of them none.
    """
    taken = min((1 << 32) - 1, math.ceil(max(0.0, note.taken)))
    head = _NOTE.pack(
        note.id, note.arrival, note.score, note.floor, note.displaced, note.label, note.model_version, taken, note.wall,
        sources.index(note.source) if note.source in sources else 0,
    )  # fmt: skip
    return head + content


def decode_note(blob: Blob, sources: Sequence[str] = ()) -> Note:
    """What is known of the sample of a record; of a source whose name is lost, nothing."""
    id_, arrival, score, floor, displaced, label, version, taken, wall, source = _NOTE.unpack_from(blob.data)
    name = sources[source] if source < len(sources) else ""
    return Note(id_, label, label, arrival, score, 0, version, floor, displaced, float(taken), wall, name)


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


@dataclass(frozen=True)
class SampleForm:
    """What every sample of a store looks like."""

    dtype: np.dtype[np.generic]
    """Of what arrives."""
    shape: tuple[int, ...]
    encoding: EncodingName | None = None
    """In how few bytes it is stored; None: as it arrives."""
    deflate_to: int | None = None
    """Into how many bytes it is deflated; None: it is not."""
    discounts: bool = False
    """Whether its score counts for less after use: then there is more to keep of its rank."""

    @property
    def nbytes(self) -> int:
        """Of a stored sample, at most."""
        return self.codec().nbytes

    def codec(self) -> SampleCodec:
        return SampleCodec(self.shape, self.dtype.str, self.encoding, self.deflate_to)

    @property
    def name(self) -> str:
        """What a stored sample is, for the label of the file."""
        return self.dtype.str if self.encoding is None else self.encoding

    def shaped(self, x: object) -> AnyArray | None:
        """The numbers in the samples' shape and type; None if they are not such numbers, or do not fit the type."""
        try:
            array = np.asarray(x)
            if array.dtype.kind not in "fiu":
                return None
            if array.dtype != self.dtype:
                limits = np.iinfo(self.dtype.str) if self.dtype.kind in "iu" else None
                if limits is not None and not np.all((array >= limits.min) & (array <= limits.max)):
                    return None
                with np.errstate(over="ignore"):
                    array = array.astype(self.dtype)
        except Exception:  # noqa: BLE001 - whatever a hostile object does when it is looked at
            return None
        if array.shape == self.shape:
            return array
        return array.reshape(self.shape) if array.ndim == 1 and array.size == np.prod(self.shape) else None
