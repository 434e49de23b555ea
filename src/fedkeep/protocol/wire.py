"""The serialisation of every message: a msgpack head, and the arrays it refers to beside it.

The format is the same on the agent's socket and in Flower's records. No received byte is executed,
no memory is allocated by a size that a message merely claims, and incompatible versions are
rejected with a sentence. Messages may contain any dataclass of the core: a field added to one is
serialised without further code.
"""

import math
import re
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np

from fedkeep.core.errors import RejectedError
from fedkeep.core.gradients.codec import Encoding, PackedVector, packed_form, scale_count
from fedkeep.core.gradients.codec import unpack as decode_vector
from fedkeep.core.types import AnyArray, Vector

VERSION = 1
"""Version of the format, the first two bytes of every head.

Raise it when a message changes so that the other side would misread it.
"""
_ARRAY, _PACKED = 1, 2
"""Extension types: an array, and a vector in fewer bits (`core.gradients.codec`)."""
_SHORT: tuple[Encoding, ...] = ("float16", "int8", "int4")
_NUMBERS = re.compile(r"[<|][iuf][1248]")
_MOST_PARTS = 64
_Described = tuple[int, str, tuple[int, ...]]
"""An array's number among the parts, its type and its shape."""


def pack(message: Any) -> tuple[bytes, list[AnyArray]]:
    """Serialise a message to its head and its arrays.

    Returns
    -------
    tuple of bytes and list of arrays
        A transport may share the arrays between messages.

    Examples
    --------
    >>> head, arrays = pack({"round": 3, "model": np.zeros(2)})
    >>> unpack(head, [array.tobytes() for array in arrays], Any)
    {'round': 3, 'model': array([0., 0.])}
    """
    arrays: list[AnyArray] = []

    def aside(value: Any) -> msgspec.msgpack.Ext:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a message cannot hold {type(value).__name__}")
        packed = value.packed if isinstance(value, PackedVector) else None
        if packed is None:
            return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(described(value)))
        parts = (described(packed["packed"]), described(packed["scales"]), len(value))
        return msgspec.msgpack.Ext(_PACKED, msgspec.msgpack.encode(parts))

    def described(value: AnyArray) -> _Described:
        array = np.ascontiguousarray(value)
        arrays.append(array)
        return len(arrays) - 1, array.dtype.newbyteorder("<").str, array.shape

    return VERSION.to_bytes(2) + msgspec.msgpack.encode(message, enc_hook=aside), arrays


def unpack(head: bytes | memoryview, parts: Sequence[bytes | memoryview], kind: Any) -> Any:
    """Read a message from its head and parts.

    Parameters
    ----------
    head : bytes
        What `pack` returned first.
    parts : sequence of bytes
        The arrays' bytes, little-endian; the arrays of the message are read-only views of them.
    kind : type
        The expected type, or a union.

    Raises
    ------
    RejectedError
        If the version differs, or anything does not fit the expected type.
    """
    found = int.from_bytes(head[:2])
    if found != VERSION:
        words = (
            f"the other side uses version {found} of the wire format, this one {VERSION}: "
            "install the same fedkeep"
        )
        raise RejectedError("version", words)
    used: set[int] = set()

    def extension(code: int, described: memoryview) -> AnyArray:
        if code == _ARRAY:
            return array(*msgspec.msgpack.decode(described, type=_Described))
        if code != _PACKED:
            raise RejectedError("malformed", f"extension {code} is not known")
        numbers, scales, size = msgspec.msgpack.decode(
            described, type=tuple[_Described, _Described, int]
        )
        return unpack_vector(array(*numbers), array(*scales), size)

    def array(index: int, dtype: str, shape: tuple[int, ...]) -> AnyArray:
        if (
            not 0 <= index < len(parts)
            or not _NUMBERS.fullmatch(dtype)
            or min(shape, default=0) < 0
        ):
            raise RejectedError(
                "malformed",
                f"array {index} of {dtype[:20]!r} and shape {shape[:5]} is not allowed",
            )
        used.add(index)
        data, numbers = parts[index], np.dtype(dtype)
        if len(data) != numbers.itemsize * math.prod(shape):
            words = f"{len(data)} bytes do not make an array of {numbers} and shape {shape[:5]}"
            raise RejectedError("malformed", words)
        return np.frombuffer(data, numbers).reshape(shape)

    try:
        message = msgspec.msgpack.Decoder(kind, ext_hook=extension).decode(head[2:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RejectedError("malformed", f"not the expected message: {str(error)[:200]}") from error
    if len(used) != len(parts):
        raise RejectedError(
            "malformed", f"{len(parts) - len(used)} arrays that it does not refer to"
        )
    return message


def unpack_vector(numbers: AnyArray, scales: AnyArray, size: int) -> Vector:
    """Decode a vector that was sent in fewer bits; forms that no encoding has are rejected."""
    forms = {form: length for length, form in (packed_form(size, e) for e in _SHORT)}
    fits = forms.get(numbers.dtype.name) == len(numbers) and scales.dtype == np.float32
    if numbers.ndim != 1 or not fits or scales.shape != (scale_count(size, "int8"),):
        raise RejectedError("malformed", f"{len(numbers)} numbers do not encode {size}")
    return decode_vector({"packed": numbers, "scales": scales}, size)


def to_bytes(message: Any) -> bytes:
    """Serialise a message to contiguous bytes, for a socket."""
    head, arrays = pack(message)
    parts = [head, *(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays)]
    return struct.pack(f">{1 + len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


def from_bytes(payload: bytes, kind: Any) -> Any:
    """Read a message that `to_bytes` serialised.

    Examples
    --------
    >>> from fedkeep.core.types import Profile
    >>> from_bytes(to_bytes(Profile(capacity=4, velocity=np.array([2.0, 0.5]))), Profile).rate
    2.5
    """
    (count,) = struct.unpack_from(">I", payload) if len(payload) >= 4 else (0,)
    if not 1 <= count <= _MOST_PARTS or len(payload) < 4 * (1 + count):
        raise RejectedError("malformed", "not a message of fedkeep, or one of a version before 1")
    lengths = struct.unpack_from(f">{count}I", payload, 4)
    ends = list(accumulate(lengths, initial=4 * (1 + count)))
    if ends[-1] != len(payload):
        raise RejectedError("malformed", f"{len(payload)} bytes are not the sum of its parts")
    head, *parts = (memoryview(payload)[start:end] for start, end in pairwise(ends))
    return unpack(head, parts, kind)


def to_array(value: Any) -> AnyArray:
    """Serialise plain values, without arrays, to an array of bytes for a state."""
    return np.frombuffer(msgspec.msgpack.encode(value), dtype=np.uint8)


def from_array(array: AnyArray, kind: Any) -> Any:
    """Read values that `to_array` serialised.

    Examples
    --------
    >>> from_array(to_array({7: "hall"}), dict[int, str])
    {7: 'hall'}
    """
    return msgspec.msgpack.decode(array.tobytes(), type=kind)
