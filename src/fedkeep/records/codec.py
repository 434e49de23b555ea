"""Lines to bytes and back; each line ends in a checksum, so that a flipped bit is noticed."""

from __future__ import annotations

import re
from typing import Any
from zlib import crc32

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


_SUM = re.compile(rb',"sum":"([0-9a-f]{8})"\}\s*$')


def encode(line: Line) -> bytes:
    """The line as JSON without its newline; floats in the shortest form that reads back exactly."""
    body = _encoder.encode(line)
    return body[:-1] + b',"sum":"%08x"}' % crc32(body)


def is_intact(raw: bytes) -> bool | None:
    """Whether the line is what was written; None of one that carries no checksum, as by another program."""
    found = _SUM.search(raw)
    return None if found is None else crc32(raw[: found.start()] + b"}") == int(found[1], 16)


def stamp(raw: bytes) -> Stamp | None:
    """The line's kind and round, or None where it is torn, damaged or no record at all."""
    if is_intact(raw) is False:
        return None
    try:
        return _stamps.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode(raw: bytes) -> Line | None:
    """The line, or None for a kind that this version does not know."""
    if is_intact(raw) is False:
        raise DataError("damaged: its checksum does not fit; delete the file and run again with --resume")
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        known = stamp(raw)
        if known is not None and known.kind not in KINDS:
            return None
        raise DataError(f"not a record: {error}") from error
