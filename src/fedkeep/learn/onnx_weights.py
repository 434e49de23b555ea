"""Where the parameters lie inside an ONNX file, so that a device can put new ones in without the onnx library.

An ONNX file is a protobuf message: ModelProto.graph (field 7) holds GraphProto.initializer (field 5), each a
TensorProto with dims (1), data_type (2), name (8) and raw_data (9). ModelProto.metadata_props (field 14) holds
pairs of key (1) and value (2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.core.types import Vector
from fedkeep.learn.flat import Layout

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT = 1


@dataclass(frozen=True)
class _Tensor:
    name: str
    data_type: int
    start: int
    end: int


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, value, and the place of the bytes of each field of the message between `at` and `end`."""
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value, start = 0, at
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire == _BYTES:
            length, start = _varint(data, at)
            at = start + length
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if at > end:
            raise ValueError("a field runs past its message")
        yield number, value, start, at


def _initializers(data: bytes) -> Iterator[_Tensor]:
    for number, _, start, end in _fields(data, 0, len(data)):
        if number != 7:
            continue
        for inner, _, inner_start, inner_end in _fields(data, start, end):
            if inner == 5:
                yield _tensor(data, inner_start, inner_end)


def _tensor(data: bytes, start: int, end: int) -> _Tensor:
    name, data_type, place = "", 0, (0, 0)
    for number, value, at, to in _fields(data, start, end):
        if number == 2:
            data_type = value
        elif number == 8:
            name = data[at:to].decode()
        elif number == 9:
            place = (at, to)
    return _Tensor(name, data_type, *place)


def read_metadata(data: bytes) -> dict[str, str]:
    """What the writer of an ONNX file noted in it; raises `DataError` if it is none."""
    try:
        pairs = [
            {inner: data[at:to].decode() for inner, _, at, to in _fields(data, start, end)}
            for number, _, start, end in _fields(data, 0, len(data))
            if number == 14
        ]
    except (ValueError, IndexError) as error:
        raise DataError(f"this is not an ONNX file: {error}") from error
    return {pair.get(1, ""): pair.get(2, "") for pair in pairs}


class OnnxWeights:
    """The parameters of `layout` inside the bytes of an ONNX file."""

    def __init__(self, data: bytes, layout: Layout) -> None:
        self._data = data
        try:
            found = {tensor.name: tensor for tensor in _initializers(data)}
        except (ValueError, IndexError, UnicodeDecodeError) as error:
            raise DataError(f"this is not an ONNX file: {error}") from error
        self._places = []
        for name, part in zip(layout.names, layout.slices, strict=True):
            tensor = found.get(name)
            size = 4 * (part.stop - part.start)
            if tensor is None or tensor.data_type != _FLOAT or tensor.end - tensor.start != size:
                raise DataError(f"the ONNX file does not hold the parameter '{name}': write it by `fedkeep export`")
            self._places.append((tensor.start, tensor.end, part))

    def read(self) -> Vector:
        """The parameters as they are in the file."""
        parts = [np.frombuffer(self._data[start:end], "<f4") for start, end, _ in self._places]
        return np.concatenate(parts).astype(np.float32)

    def replaced(self, model: Vector) -> bytes:
        """The file with these parameters instead."""
        data = bytearray(self._data)
        for start, end, part in self._places:
            data[start:end] = np.asarray(model[part], dtype="<f4").tobytes()
        return bytes(data)
