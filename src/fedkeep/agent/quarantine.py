"""The last records that were refused, as they came, for people to look at; bounded, and never on the disk."""

from __future__ import annotations

import reprlib
import threading
import time
from collections import deque
from typing import Any, NamedTuple

_RECORDS = 64
_BYTES = 512


class Refused(NamedTuple):
    time: float
    source: str
    reason: str
    raw: str
    """The beginning of the record."""


class Quarantine:
    """Holds the latest refusals."""

    def __init__(self) -> None:
        self._records: deque[Refused] = deque(maxlen=_RECORDS)
        self._lock = threading.Lock()

    def add(self, source: str, reason: str, raw: Any) -> None:
        with self._lock:
            self._records.append(Refused(time.time(), source, reason, shown(raw)))

    def records(self) -> list[Refused]:
        """The refusals, oldest first."""
        with self._lock:
            return list(self._records)

    def clear(self) -> None:
        with self._lock:
            self._records.clear()


_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxdict = 12
_short.maxstring = _short.maxother = _short.maxlong = _BYTES


def shown(raw: Any) -> str:
    """The beginning of anything at all, as text."""
    if isinstance(raw, bytes | bytearray | memoryview):
        return bytes(raw[:_BYTES]).decode(errors="backslashreplace")
    try:
        return _short.repr(raw)[:_BYTES]
    except Exception as error:  # noqa: BLE001 - whatever a hostile record does when it is looked at
        return f"{type(raw).__name__} that cannot be shown ({type(error).__name__})"
