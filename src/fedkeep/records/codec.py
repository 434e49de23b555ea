"""Lines to bytes and back."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.records.lines import KINDS, Line


class Stamp(msgspec.Struct, frozen=True):
    """The part of a line that orders it."""

    kind: str
    round: int = -1


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a record cannot hold {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain, order="deterministic")
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_stamps = msgspec.json.Decoder(Stamp)


def encode(line: Line) -> bytes:
    """The line as JSON without its newline; floats in the shortest form that reads back exactly."""
    return _encoder.encode(line)


def stamp(raw: bytes) -> Stamp | None:
    """The line's kind and round, or None where it is torn or no record at all."""
    try:
        return _stamps.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode(raw: bytes) -> Line | None:
    """The line, or None for a kind that this version does not know."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        known = stamp(raw)
        if known is not None and known.kind not in KINDS:
            return None
        raise DataError(f"not a record: {error}") from error
