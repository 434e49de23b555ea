"""Ciphertexts of many devices in a file without a name: they are too large for memory, and gone with the process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from tempfile import TemporaryFile

from fedkeep.core.types import DeviceId


class Spool:
    """What each device sent, in the order it was sent."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - open as long as this is, see the next line
        weakref.finalize(self, self._file.close)
        self._places: dict[DeviceId, list[tuple[int, int]]] = {}

    def keep(self, device: DeviceId, parts: Iterable[bytes]) -> None:
        self._places[device] = [self._append(part) for part in parts]

    def kept(self, device: DeviceId) -> Iterator[bytes]:
        for start, length in self._places[device]:
            self._file.seek(start)
            yield self._file.read(length)

    def _append(self, part: bytes) -> tuple[int, int]:
        start = self._file.seek(0, 2)
        self._file.write(part)
        return start, len(part)
