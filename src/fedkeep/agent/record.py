"""What the blobs of a store hold, and how it becomes bytes and comes back.

Samples, and named arrays of state.

Then the small state that is committed with the samples: what was counted and decided.
"""

import json
import math
import struct
import zlib
from base64 import b64decode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedkeep.agent.cellfile import Blob
from fedkeep.agent.cells import FAR
from fedkeep.config.canonical import stored_name
from fedkeep.core.policy import POLICIES
from fedkeep.core.protocols import OfferResult, Outcome
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray, ArraySpec, IntArray, State, StateSpec
from fedkeep.encoding import EncodingName, SampleCodec
from fedkeep.protocol.messages import Reason

SAMPLE, ARRAY, PACK = 1, 2, 3
_NOTE = struct.Struct("<qqdfqiiIdH")
"""Id, arrival, score, floor, displaced, label, model version, age in whole seconds, wall time,
number of the source."""
META_BYTES = _NOTE.size
_LENGTH = struct.Struct("<I")
_PACK_NAME = ""
_SMALL = 256
"""Arrays of at most this many bytes share one blob: a cell each would waste most of it."""
_COUNTER_BYTES = 1024
"""More than the counts by name ever take as text."""
APART = "apart."
"""How the names of arrays begin that are kept twice, far from each other.

One of them must outlive the other.
"""


class SampleMetadata(NamedTuple):
    """All that is stored of a sample besides the sample itself.

    At the end stands what is known of it otherwise.
    """

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
    name: str = ""
    """Its id as it came, where that is not the number itself and was short enough to be kept."""
    target: tuple[float, ...] = ()
    """The numbers to predict; its label is then the interval they lie in."""
    time: float = math.nan
    """The record's own time, in seconds since 1970; NaN where it said none or there was no room."""
    rules: tuple[str, ...] = ()
    """The names of the rules that held or limited it when it was stored."""
    apart: bool = False
    """Whether rules alone held it then."""


def join_name(row: bytes, name: str, most: int) -> bytes:
    """Return an encoded sample with its name behind it, where names of up to `most` bytes are kept.

    >>> split_name(join_name(b"row", "hall/7", 24), 24)
    (b'row', 'hall/7')
    >>> split_name(join_name(b"row", "hall/7", 4), 4)
    (b'row', '')
    """
    if not most:
        return row
    raw = name.encode(errors="surrogatepass")
    raw = raw if len(raw) <= most else b""
    return row + raw + bytes([len(raw)])


def split_name(content: bytes, most: int) -> tuple[bytes, str]:
    """Return an encoded sample and its name, as `join_name` put them together."""
    if not most:
        return content, ""
    end = len(content) - 1
    start = max(0, end - content[end])
    return content[:start], content[start:end].decode(errors="replace")


_WITH_RULES, _APART, _JOINT = "\x1f", "-", "/"


def origin_of(note: SampleMetadata) -> str:
    r"""Return what stands for a sample's source and rules among the names of a file's sources.

    >>> origin_of(SampleMetadata(1, source="door", rules=("alarms",), apart=True))
    'door\x1f-alarms'
    """
    if not note.rules:
        return note.source
    return f"{note.source}{_WITH_RULES}{_APART * note.apart}{_JOINT.join(note.rules)}"


def join_extras(content: bytes, note: SampleMetadata, most: int) -> bytes:
    """Return an encoded sample with what its record said of itself, in up to `most` bytes.

    >>> note = SampleMetadata(1, time=1.75e9)
    >>> content = join_extras(b"row", note, 16)
    >>> split_extras(content, 16)
    (b'row', {'time': 1750000000.0})
    >>> split_extras(join_extras(b"row", note, 4), 4)
    (b'row', {})
    """
    if not most:
        return content
    extras = b"" if math.isnan(note.time) else msgspec.msgpack.encode({"time": note.time})
    extras = extras if len(extras) <= most else b""
    return content + extras + bytes([len(extras)])


def split_extras(content: bytes, most: int) -> tuple[bytes, dict[str, Any]]:
    """Return an encoded sample and what else is known of it, as `join_extras` put them together."""
    if not most:
        return content, {}
    end = len(content) - 1
    start = max(0, end - content[end])
    if start == end:
        return content[:start], {}
    return content[:start], msgspec.msgpack.decode(content[start:end])


def join_content(row: bytes, note: SampleMetadata, form: "SampleForm") -> bytes:
    """Return an encoded sample with all that is kept behind it."""
    named = join_name(join_extras(row, note, form.extra_bytes), note.name, form.name_bytes)
    return join_target(note.target, named)


def split_content(
    blob: Blob, note: SampleMetadata, form: "SampleForm"
) -> tuple[bytes, SampleMetadata]:
    """Return the encoded sample of a record, and its note with what is kept behind the sample."""
    target, content = split_target(blob.data[META_BYTES:], form.target_width)
    content, name = split_name(content, form.name_bytes)
    row, extras = split_extras(content, form.extra_bytes)
    return row, note._replace(name=name, target=target, **extras)


def encode_sample(note: SampleMetadata, content: bytes, sources: list[str]) -> tuple[int, bytes]:
    """Return a blob for a record: the note, and the sample as its codec encoded it.

    `sources` are the names that numbers stand for, the first of them none.
    """
    taken = min((1 << 32) - 1, math.ceil(max(0.0, note.taken)))
    origin = origin_of(note)
    origin = origin if origin in sources else note.source
    number = sources.index(origin) if origin in sources else 0
    return SAMPLE, _NOTE.pack(*note[:7], taken, note.wall, number) + content


def join_target(target: Sequence[float], row: bytes) -> bytes:
    """Return an encoded sample with the numbers to predict before it, eight bytes each.

    >>> split_target(join_target((12.5,), b"row"), 1)
    ((12.5,), b'row')
    >>> split_target(join_target((), b"row"), 0)
    ((), b'row')
    """
    return np.asarray(target, dtype="<f8").tobytes() + row


def split_target(content: bytes, width: int) -> tuple[tuple[float, ...], bytes]:
    """Return the numbers to predict and the encoded sample, as `join_target` put them together."""
    end = 8 * width
    return tuple(np.frombuffer(content[:end], dtype="<f8").tolist()), content[end:]


def decode_note(blob: Blob, sources: Sequence[str] = ()) -> SampleMetadata:
    """Return what is known of the sample of a record; of a source whose name is lost, nothing."""
    id_, arrival, score, floor, displaced, *rest = _NOTE.unpack_from(blob.data)
    label, model, taken, wall, source = rest
    origin = sources[source] if source < len(sources) else ""
    name, _, rules = origin.partition(_WITH_RULES)
    came = (id_, arrival, score, floor, displaced, label, model)
    note = SampleMetadata(*came, float(taken), wall, name, label)
    if not rules:
        return note
    names = tuple(rules.removeprefix(_APART).split(_JOINT))
    return note._replace(rules=names, apart=rules.startswith(_APART))


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
    name_bytes: int = 0
    """The longest name that is kept with it; 0: none is."""
    targets: NumberTargets | None = None
    """What its targets look like that are numbers; None: it has a label."""

    extra_bytes: int = 0
    """Bytes for what its record said of itself, such as its own time; 0: that is not kept."""
    payload_bytes: int | None = None
    """A sample is a file of at most so many bytes, which are kept as they came; None: numbers."""
    typical_bytes: int | None = None
    """What such a file takes on average; None: as much as it may."""

    @property
    def target_width(self) -> int:
        """How many numbers to predict are stored with it."""
        return 0 if self.targets is None else self.targets.width

    @property
    def content_bytes(self) -> int:
        """Bytes of a stored sample with all that is kept behind it, at most."""
        return self._with_rest(self.payload_bytes or self.codec().nbytes)

    @property
    def typical_content(self) -> int:
        """The same of a sample of average size."""
        return self._with_rest(self.typical_bytes or self.payload_bytes or self.codec().nbytes)

    def _with_rest(self, row: int) -> int:
        behind = sum(most + 1 for most in (self.name_bytes, self.extra_bytes) if most)
        return 8 * self.target_width + row + behind

    @property
    def arriving_bytes(self) -> int:
        """Bytes of a sample as it arrives."""
        return self.payload_bytes or self.dtype.itemsize * math.prod(self.shape)

    @property
    def longest_json(self) -> int:
        """Bytes that a sample can take as JSON, where a file is written as base64."""
        return 4096 + (2 * self.payload_bytes if self.payload_bytes else 32 * self.arriving_bytes)

    @property
    def longest_packed(self) -> int:
        """Bytes that a sample can take as msgpack."""
        return 4096 + (self.payload_bytes or 16 * self.arriving_bytes)

    def codec(self) -> SampleCodec:
        """Make the codec of such samples."""
        return SampleCodec(self.shape, self.dtype.str, self.encoding, self.deflate_to)

    def taken(self, x: object) -> AnyArray | bytes | None:
        """Return a sample as it waits to be valued; None if it is none, or does not fit."""
        return self.shaped(x) if self.payload_bytes is None else _payload(x)

    def shaped(self, x: object) -> AnyArray | None:
        """Return numbers in the samples' shape and type; None if they are none, or do not fit."""
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
        return (
            array.reshape(self.shape)
            if array.ndim == 1 and array.size == np.prod(self.shape)
            else None
        )


def _payload(x: object) -> bytes | None:
    """Return the bytes of a file; in JSON they are base64."""
    if isinstance(x, bytes | bytearray | memoryview):
        return bytes(x)
    if not isinstance(x, str):
        return None
    try:
        return b64decode(x, validate=True)
    except ValueError:
        return None


def decode_array(data: bytes) -> tuple[str, AnyArray]:
    """Return the name and the numbers of an array."""
    (length,) = _LENGTH.unpack_from(data)
    name, kind, shape = json.loads(data[4 : 4 + length])
    dtype = np.dtype([tuple(part) for part in kind] if isinstance(kind, list) else kind)
    return name, np.frombuffer(data, dtype, offset=4 + length).reshape(shape).copy()


def newest_of(blobs: list[Blob]) -> dict[int | str, Blob]:
    """Return the newest blob of each sample, by its id, and of each array, by its name."""

    def name(blob: Blob) -> int | str:
        if blob.kind == SAMPLE:
            return decode_note(blob).id
        return _PACK_NAME if blob.kind == PACK else decode_array(blob.data)[0]

    return {name(blob): blob for blob in sorted(blobs)}


def encode_arrays(state: State) -> dict[str, tuple[int, bytes]]:
    """Return arrays of numbers or of fixed-width text as blobs, by name; small ones share one."""
    encoded: dict[str, bytes] = {}
    for name, array in state.items():
        if array.dtype.hasobject:
            raise TypeError(f"the state '{name}' holds Python objects, which cannot be stored")
        kind = array.dtype.descr if array.dtype.names else array.dtype.str
        head = json.dumps([name, kind, array.shape]).encode()
        encoded[name] = _LENGTH.pack(len(head)) + head + array.tobytes()
    small = [
        name
        for name in sorted(state)
        if state[name].nbytes <= _SMALL and not name.startswith(APART)
    ]
    pack = b"".join(_LENGTH.pack(len(data)) + data for data in map(encoded.pop, small))
    kinds = {name: FAR if name.startswith(f"{APART}1") else ARRAY for name in encoded}
    return {
        _PACK_NAME: (PACK, pack),
        **{name: (kinds[name], data) for name, data in encoded.items()},
    }


def decode_arrays(newest: dict[int | str, Blob]) -> State:
    """Return the arrays among a file's blobs, as `newest_of` gives them."""
    arrays = {name: blob.data for name, blob in newest.items() if isinstance(name, str)}
    pack, start, encoded = arrays.pop(_PACK_NAME, b""), 0, []
    while start < len(pack):
        (length,) = _LENGTH.unpack_from(pack, start)
        start += _LENGTH.size + length
        encoded.append(pack[start - length : start])
    return dict(map(decode_array, [*encoded, *arrays.values()]))


class CounterBook(Counter[str]):
    """Counts by name since the store was made."""

    def counts(self) -> dict[str, int]:
        """Return what is not zero, by name."""
        return {name: count for name, count in sorted(self.items()) if count}

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        return {"json": ArraySpec((_COUNTER_BYTES,), np.uint8, bounded=True)}

    def snapshot(self) -> State:
        """Take the counts as text."""
        return {"json": np.frombuffer(json.dumps(self.counts()).encode(), dtype=np.uint8)}

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        self.clear()
        self.update(json.loads(state["json"].tobytes()))


@dataclass
class ModelVersion:
    """Of which round the present model and g_hat are, and when they came by the age clock."""

    round: int = -1
    received: float | None = None

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        return {"date": ArraySpec((2,), np.float64)}

    def snapshot(self) -> State:
        """Take round and time."""
        return {"date": np.array([self.round, self.received], dtype=np.float64)}  # None becomes NaN

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        round_, received = state["date"].tolist()
        self.round, self.received = int(round_), None if np.isnan(received) else received


_POLICY_BYTES = 16
CHUNK = 32
"""Decisions that are written together."""
_ROW = np.dtype(
    [
        ("id", "<i8"), ("arrival", "<i8"), ("label", "<i4"), ("verdict", "<i4"),
        ("score", "<f8"), ("floor", "<f8"), ("displaced", "<i8"),
        ("model", "<i8"), ("wall", "<f8"), ("policy", "S16"),
    ]
)  # fmt: skip
ROW_BYTES = _ROW.itemsize
_COLUMN_BYTES = [_ROW[name].itemsize for name in _ROW.names or ()]


class Verdict(IntEnum):
    """A sample's fate on arrival, or how it left."""

    REFUSED = OfferResult.REFUSED
    KEPT = OfferResult.KEPT
    REPLACED = OfferResult.REPLACED
    REFRESHED = OfferResult.REFRESHED
    ERASED = 10
    """On request; nothing else of the sample is left, here or elsewhere."""
    EXPIRED = 11
    DROPPED = 12
    """It no longer fitted the quotas, or its new score ruled it out."""
    WAITING = 13
    """It came without a label, and waits for it."""
    UNLABELLED = 14
    """It left the waiting room without a label."""
    CORRECTED = 15
    """It is stored under another label from now on."""


_RULE = b"#"
"""How the names of rules begin where policies have theirs."""


def _logged_rule(rule: str) -> bytes:
    """Return a rule's name as rows have it, cut."""
    return (_RULE + rule.encode())[:_POLICY_BYTES]


def _logged(policy: str) -> bytes:
    """Return a policy's name as rows have it: what stored data calls it, cut."""
    return stored_name("policy", policy).encode()[:_POLICY_BYTES]


class DecisionLog:
    """The latest `length` decisions that changed the store, and as many refusals.

    Refusals are kept in memory: they are most of a stream, and writing each to flash would cost
    more than the samples themselves.
    """

    def __init__(self, length: int, policy: str) -> None:
        self._rows: NDArray[np.void] = np.zeros(max(1, -(-length // CHUNK)) * CHUNK, dtype=_ROW)
        self._refused = self._rows.copy()
        self._length = length
        self._written = self._refusals = 0
        self._deflated: dict[int, AnyArray] = {}
        """The chunks that have not changed since they were last stored, as they were stored."""
        self.policy, self._policy = policy, _logged(policy)
        self.rules: tuple[str, ...] = ()
        """The names of the rules of today, by which rows that cut them are read."""

    def add(self, note: SampleMetadata, verdict: Verdict) -> None:
        """Log a decision that changed the store: the policy's, or that of a rule alone."""
        by = _logged_rule(note.rules[0]) if note.apart and note.rules else self._policy
        place = self._written % len(self._rows)
        self._deflated.pop(place // CHUNK, None)
        self._rows[place] = (
            note.id, note.arrival, note.label, verdict, note.score, note.floor, note.displaced,
            note.model_version, note.wall, by,
        )  # fmt: skip
        self._written += 1

    def add_forbidden(self, labels: IntArray, ids: IntArray, rule: str, wall: float) -> None:
        """Log samples that a rule never stores."""
        nothing, none = np.full(len(ids), -1), np.full(len(ids), np.nan)
        refused = np.full(len(ids), int(OfferResult.REFUSED))
        outcome = Outcome(refused, nothing, none, none)
        self.add_refusals(labels, ids, nothing, outcome, -1, wall, _logged_rule(rule))

    def add_refusals(
        self,
        labels: IntArray,
        ids: IntArray,
        arrivals: IntArray,
        outcome: Outcome,
        model: int,
        wall: float,
        by: bytes | None = None,
    ) -> None:
        """Log the refusals among the outcomes of a batch: the policy's, or those `by` a rule."""
        refused = np.flatnonzero(outcome.results == OfferResult.REFUSED)[-len(self._refused) :]
        rows = np.zeros(len(refused), dtype=_ROW)
        columns = (ids, arrivals, labels, outcome.scores, outcome.thresholds)
        for name, values in zip(("id", "arrival", "label", "score", "floor"), columns, strict=True):
            rows[name] = values[refused]
        rows["displaced"], rows["model"], rows["wall"], rows["policy"] = (
            -1,
            model,
            wall,
            self._policy if by is None else by,
        )
        self._refused[(self._refusals + np.arange(len(rows))) % len(self._refused)] = rows
        self._refusals += len(rows)

    def about(self, id_: int) -> list[Reason]:
        """Return all decisions on one sample that are still logged, oldest first.

        The one that displaced it is included.
        """
        rows = np.concatenate([self._refused, self._rows])
        # A row without a policy was never written.
        found = rows[((rows["id"] == id_) | (rows["displaced"] == id_)) & (rows["policy"] != b"")]
        found = np.sort(found, order=("wall", "arrival"), kind="stable")
        reasons = []
        for known, _, label, verdict, *scores, displaced, model, wall, policy in found.tolist():
            score, floor = (None if np.isnan(value) else value for value in scores)
            gone = None if displaced < 0 else displaced
            name = Verdict(verdict).name.lower()
            by = self._named(policy)
            reasons.append(Reason(known, name, label, score, floor, gone, model, by, wall))
        return reasons

    def _named(self, logged: bytes) -> str:
        """Return the present name of the policy, or of the rule, that a row names."""
        if logged.startswith(_RULE):
            begun = logged.removeprefix(_RULE).decode(errors="replace")
            return "rule " + next((rule for rule in self.rules if rule.startswith(begun)), begun)
        for policy in (self.policy, *POLICIES):
            if logged in (_logged(policy), policy.encode()[:_POLICY_BYTES]):
                return policy
        return logged.decode(errors="replace")

    def forget(self, ids: IntArray) -> None:
        """Leaves no trace of these samples' labels and values."""
        self._deflated.clear()
        for rows in (self._rows, self._refused):
            rows[np.isin(rows["id"], ids)] = np.zeros((), dtype=_ROW)
            rows["displaced"][np.isin(rows["displaced"], ids)] = -1

    def snapshot(self) -> State:
        """In deflated chunks, of which a commit writes those that changed."""
        begun = min(len(self._rows), self._written) if self._length else 0
        chunks = {str(i): self._chunk(i) for i in range(-(-begun // CHUNK))}
        return {"written": np.array(self._written), **chunks}

    def restore(self, state: State) -> None:
        """Take over the chunks that have a place here; a version before did not deflate them."""
        for i in range(len(self._rows) // CHUNK):
            chunk = _inflated(state.get(str(i), np.zeros(0)))
            if chunk is not None:
                self._rows[i * CHUNK : (i + 1) * CHUNK] = chunk
        self._written = int(state.get("written", 0))
        self._deflated.clear()

    def _chunk(self, index: int) -> AnyArray:
        """Return a chunk as it is stored; it is deflated once, until it changes."""
        found = self._deflated.get(index)
        if found is None:
            found = _deflated(self._rows[index * CHUNK : (index + 1) * CHUNK])
            self._deflated[index] = found
        return found


def _deflated(rows: NDArray[np.void]) -> AnyArray:
    """Return rows of the log in few bytes: place by place of each column, since many are alike.

    >>> rows = np.zeros(CHUNK, dtype=_ROW)
    >>> rows["id"], rows["score"] = np.arange(CHUNK), np.linspace(0, 1, CHUNK)
    >>> len(_deflated(rows)) < rows.nbytes / 5
    True
    >>> bool((_inflated(_deflated(rows)) == rows).all())
    True
    """
    columns = [np.ascontiguousarray(rows[name]) for name in _ROW.names or ()]
    places = [column.view(np.uint8).reshape(len(rows), -1).T for column in columns]
    deflated = zlib.compress(b"".join(place.tobytes() for place in places), 6)
    return np.frombuffer(deflated, np.uint8)


def _inflated(chunk: AnyArray) -> NDArray[np.void] | None:
    """Return the rows of a stored chunk, deflated or not; None where it is none."""
    if chunk.dtype == _ROW:
        return chunk if len(chunk) == CHUNK else None
    if chunk.dtype != np.uint8:
        return None
    try:
        data = zlib.decompressobj().decompress(chunk.tobytes(), CHUNK * ROW_BYTES + 1)
    except zlib.error:
        return None
    if len(data) != CHUNK * ROW_BYTES:
        return None
    rows, start = np.zeros(CHUNK, dtype=_ROW), 0
    for name, size in zip(_ROW.names or (), _COLUMN_BYTES, strict=True):
        places = np.frombuffer(data, np.uint8, CHUNK * size, start).reshape(size, CHUNK)
        rows[name] = np.ascontiguousarray(places.T).view(_ROW[name]).ravel()
        start += CHUNK * size
    return rows
