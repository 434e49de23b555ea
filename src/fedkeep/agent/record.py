"""What the blobs of a store hold, how it becomes bytes and comes back: samples, named arrays of state, and ranks."""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedkeep.agent.cellfile import Blob
from fedkeep.agent.cells import FAR
from fedkeep.core.encoding import EncodingName, SampleCodec
from fedkeep.core.types import AnyArray, State

SAMPLE, ARRAY, PACK = 1, 2, 3
_NOTE = struct.Struct("<qqdfqiiIdH")
"""Id, arrival, score, floor, displaced, label, model version, age in whole seconds, wall time, number of the source."""
META_BYTES = _NOTE.size
_LENGTH = struct.Struct("<I")
_PACK_NAME = ""
_SMALL = 256
"""Arrays of at most this many bytes share one blob: a cell each would waste most of it."""
APART = "apart."
"""How the names of arrays begin that are kept twice, far from each other: one of them must outlive the other."""


class Note(NamedTuple):
    """All that is stored of a sample besides the sample itself, and at the end what is known of it otherwise."""

    id: int
    arrival: int = -1
    score: float = math.nan
    floor: float = math.nan
    """The score it had to beat when it came; NaN where there was room."""
    displaced: int = -1
    """The id of the sample it replaced, -1 for none."""
    label: int = -1
    model_version: int = -1
    taken: float = 0.0
    """When it was stored, by the agent's own age clock (seconds); TTL counts from it."""
    wall: float = 0.0
    """When it was stored, by the device's wall clock, however wrong."""
    source: str = ""
    region: int = -1
    uses: int = 0


def encode_sample(note: Note, content: bytes, sources: list[str]) -> tuple[int, bytes]:
    """A blob for a record: the note, and the sample as its codec encoded it.

    `sources` are the names that numbers stand for, the first of them none.
    """
    taken = min((1 << 32) - 1, math.ceil(max(0.0, note.taken)))
    number = sources.index(note.source) if note.source in sources else 0
    return SAMPLE, _NOTE.pack(*note[:7], taken, note.wall, number) + content


def decode_note(blob: Blob, sources: Sequence[str] = ()) -> Note:
    """What is known of the sample of a record; of a source whose name is lost, nothing."""
    *known, label, model, taken, wall, source = _NOTE.unpack_from(blob.data)
    name = sources[source] if source < len(sources) else ""
    return Note._make([*known, label, model, float(taken), wall, name, label, 0])


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

    def codec(self) -> SampleCodec:
        return SampleCodec(self.shape, self.dtype.str, self.encoding, self.deflate_to)

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


def decode_array(data: bytes) -> tuple[str, AnyArray]:
    (length,) = _LENGTH.unpack_from(data)
    name, kind, shape = json.loads(data[4 : 4 + length])
    dtype = np.dtype([tuple(part) for part in kind] if isinstance(kind, list) else kind)
    return name, np.frombuffer(data, dtype, offset=4 + length).reshape(shape).copy()


def newest_of(blobs: list[Blob]) -> dict[int | str, Blob]:
    """The newest blob of each sample, by its id, and of each array, by its name."""

    def name(blob: Blob) -> int | str:
        if blob.kind == SAMPLE:
            return decode_note(blob).id
        return _PACK_NAME if blob.kind == PACK else decode_array(blob.data)[0]

    return {name(blob): blob for blob in sorted(blobs)}


def encode_arrays(state: State) -> dict[str, tuple[int, bytes]]:
    """The blobs of arrays of numbers or of fixed-width text, by name; those that are small are one."""
    encoded: dict[str, bytes] = {}
    for name, array in state.items():
        if array.dtype.hasobject:
            raise TypeError(f"the state '{name}' holds Python objects, which cannot be stored")
        kind = array.dtype.descr if array.dtype.names else array.dtype.str
        head = json.dumps([name, kind, array.shape]).encode()
        encoded[name] = _LENGTH.pack(len(head)) + head + array.tobytes()
    small = [name for name in sorted(state) if state[name].nbytes <= _SMALL and not name.startswith(APART)]
    pack = b"".join(_LENGTH.pack(len(data)) + data for data in map(encoded.pop, small))
    kinds = {name: FAR if name.startswith(f"{APART}1") else ARRAY for name in encoded}
    return {_PACK_NAME: (PACK, pack), **{name: (kinds[name], data) for name, data in encoded.items()}}


def decode_arrays(newest: dict[int | str, Blob]) -> State:
    """The arrays among a file's blobs, as `newest_of` gives them."""
    arrays = {name: blob.data for name, blob in newest.items() if isinstance(name, str)}
    pack, start, encoded = arrays.pop(_PACK_NAME, b""), 0, []
    while start < len(pack):
        (length,) = _LENGTH.unpack_from(pack, start)
        start += _LENGTH.size + length
        encoded.append(pack[start - length : start])
    return dict(map(decode_array, [*encoded, *arrays.values()]))
