"""What Keeper and KeeperStrategy tell each other, where Flower's mods and strategies do not look.

Mods such as `LocalDpMod` expect one ArrayRecord in a message and in its reply; clipping mods also
one ConfigRecord in the message, and one MetricRecord in the reply; strategies one ArrayRecord and
one MetricRecord in a reply. So g_hat is bytes in the message's own ConfigRecord, what differs
between nodes is in a MetricRecord beside it, and all that a reply adds is in one ConfigRecord.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedkeep.core.errors import RejectedError, RejectionReason
from fedkeep.core.gradients.codec import Encoding, PackedVector, packed_form, scale_count, unpack
from fedkeep.core.types import Vector

KEEPER = "fedkeep.keeper"
"""The name of the records that are ours alone."""
VERSION = 1
"""Of what both tell each other; raise it when the other side would misread a change."""
VERSION_KEY = "fedkeep.version"
DIRECTION, PRESET, GRADIENT = "fedkeep.direction", "fedkeep.preset", "local_gradient"
"""Keys: the first two stand among those of the strategy, the third in a reply's own record."""
RANK, _SCALES, _ENCODING, _LENGTH = (
    "rank",
    "gradient_scales",
    "gradient_encoding",
    "gradient_length",
)
"""Keys of a reply's own record: of a sketch, and of a gradient in fewer bytes."""
_FLOAT = np.dtype("<f4")
_SHORT: tuple[Encoding, ...] = ("float16", "int8", "int4")


@dataclass(frozen=True, eq=False)
class KeeperOrder:
    """What a message holds for a Keeper beside the model."""

    round: int = 0
    accepted: int | None = None
    """The round of this node's last gradient that was accepted, -1 for none; None: not sent."""
    direction: Vector | None = None
    preset: str = ""
    """The strategy's; empty: not sent."""
    version: int | None = None
    """The strategy's; None: the message is no `KeeperStrategy`'s."""


def add_orders(
    messages: Iterable[Message],
    round_: int,
    accepted: Mapping[int, int],
    direction: Vector | None,
    preset: str,
) -> list[Message]:
    """Add to each message what its Keeper is to know.

    Messages may share their content, as those of Flower's strategies do; it stays as it was. What
    is the same for all stays one record, and is uploaded once.

    Parameters
    ----------
    messages : iterable of Message
        The inner strategy's.
    round_ : int
        The round.
    accepted : mapping of int to int
        By node, the round of its last gradient that was accepted.
    direction : Vector, optional
        g_hat, from the first gradients on.
    preset : str
        The strategy's preset.
    """
    shared: dict[str, str | int | bytes] = {PRESET: preset, VERSION_KEY: VERSION}
    if direction is not None:
        shared[DIRECTION] = encode(direction)
    made: dict[int, ConfigRecord] = {}
    ordered = []
    for message in messages:
        content = RecordDict(dict(message.content.items()))
        name = next(iter(content.config_records), "config")
        config = content.config_records.get(name, ConfigRecord())
        # The record is held by the message: no other has its id meanwhile.
        if id(config) not in made:
            made[id(config)] = ConfigRecord({**config, **shared})
        content[name] = made[id(config)]
        last = accepted.get(message.metadata.dst_node_id, -1)
        content[KEEPER] = MetricRecord({"round": round_, "accepted": last})
        message.content = content
        ordered.append(message)
    return ordered


def read_order(content: RecordDict) -> KeeperOrder:
    """Return what a message holds for a Keeper; of another strategy's nothing."""
    numbers = content.metric_records.get(KEEPER, MetricRecord())
    direction, preset, version = None, "", 0 if KEEPER in content else None
    for record in content.config_records.values():
        if isinstance(found := record.get(DIRECTION), bytes):
            direction = decode(found)
        preset = str(record.get(PRESET, preset))
        if VERSION_KEY in record:
            version = int(str(record[VERSION_KEY]))
    accepted = numbers.get("accepted")
    return KeeperOrder(
        round=int(str(numbers.get("round", 0))),
        accepted=None if accepted is None else int(str(accepted)),
        direction=direction,
        preset=preset,
        version=version,
    )


def check_version(theirs: object, who: str) -> None:
    """Raise unless the other side speaks the same version of these records.

    Raises
    ------
    RejectedError
        With both versions.
    """
    if theirs != VERSION:
        spoken = "no version" if not theirs else f"version {theirs}"
        raise RejectedError(
            RejectionReason.VERSION,
            f"{who} speaks {spoken} of the records between Keeper and KeeperStrategy, this side "
            f"version {VERSION}: install the same fedkeep on server and devices",
        )


def gradient_fields(vector: Vector) -> dict[str, bytes | str | int]:
    """Return the fields of a reply's own record that hold a gradient, in its own encoding."""
    packed = vector.packed if isinstance(vector, PackedVector) else None
    if packed is None:
        return {GRADIENT: encode(vector)}
    form = packed["packed"].dtype
    return {
        GRADIENT: packed["packed"].astype(form.newbyteorder("<")).tobytes(),
        _SCALES: encode(packed["scales"]),
        _ENCODING: str(form),
        _LENGTH: len(vector),
    }


def read_gradient(record: ConfigRecord) -> Vector:
    """Return the gradient that `gradient_fields` wrote.

    Raises
    ------
    RejectedError
        If there is none, or its parts do not fit each other.

    Examples
    --------
    >>> from fedkeep.core.gradients.codec import pack, unpack
    >>> vector = unpack(pack(np.ones(100, np.float32), "int8", seed=0), 100)
    >>> fields = gradient_fields(vector)
    >>> len(fields["local_gradient"]), read_gradient(ConfigRecord(fields)).round(6).tolist()[:2]
    (100, [1.0, 1.0])
    """
    raw, scales = record.get(GRADIENT), record.get(_SCALES)
    if not isinstance(raw, bytes):
        raise RejectedError(RejectionReason.MALFORMED, "its gradient is no bytes")
    if scales is None:
        return decode(raw)
    length, word = record.get(_LENGTH), record.get(_ENCODING)
    encoding = next((e for e in _SHORT if packed_form(1, e)[1] == word), None)
    if encoding is None or not isinstance(length, int) or not isinstance(scales, bytes):
        raise RejectedError(RejectionReason.MALFORMED, f"a gradient in {word!r} cannot be read")
    count, form = packed_form(max(length, 0), encoding)
    dtype = np.dtype(form)
    expected = (count * dtype.itemsize, _FLOAT.itemsize * scale_count(max(length, 0), encoding))
    if (len(raw), len(scales)) != expected:
        raise RejectedError(
            RejectionReason.MALFORMED,
            f"{length} numbers in {word!r} take {expected} bytes, not {(len(raw), len(scales))}",
        )
    numbers = np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype)
    return unpack({"packed": numbers, "scales": decode(scales)}, length)


def encode(vector: Vector) -> bytes:
    """Return a vector as little-endian float32.

    >>> decode(encode(np.array([1.0, 2.5], dtype=np.float32))).tolist()
    [1.0, 2.5]
    """
    return np.ascontiguousarray(vector, dtype=_FLOAT).tobytes()


def decode(raw: bytes) -> Vector:
    """Return the vector that `encode` wrote: a read-only view of it.

    Raises
    ------
    RejectedError
        If it is no whole number of floats.
    """
    if len(raw) % _FLOAT.itemsize:
        raise RejectedError(RejectionReason.MALFORMED, f"{len(raw)} bytes are no vector of float32")
    return np.frombuffer(raw, dtype=_FLOAT).astype(np.float32, copy=False)
