"""JSON lines or CSV from a file, a pipe or standard input."""

import codecs
import csv
import os
import select
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

import msgspec

from fedkeep.agent.arrivals import IngestQueue, Source
from fedkeep.core.errors import ConfigError, DataError

_POLL_MS = 200


class Line(msgspec.Struct):
    """One record: numbers, label and, if it has one, its id as it came."""

    x: list[Any]
    y: Any
    id: Any = None


_decoder = msgspec.json.Decoder(Line)


def parse_json(line: bytes) -> Line | None:
    """Return the record of one JSON line; None if it is none, however deep, long or broken."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError):
        return None


@dataclass
class LinesSource(Source):
    """Reads to the end of the file; then the agent goes on without it.

    A file or pipe has no way back: it waits while the agent cannot keep up, and whoever writes into
    a pipe is held back.

    A JSON line is `{"x": [...], "y": 3, "id": "any name"}`; a CSV has a header with the columns `y` and `id`.
    """

    path: str = "-"
    """A file or named pipe; "-" is standard input."""
    format: Literal["json", "csv"] | None = None
    """None: CSV if the path ends in .csv, else as the first line tells that begins with a brace or names the label."""
    label: str = "y"
    """The CSV column that holds the label; `id` is the optional column of names, all others are features in order."""

    def open(self) -> None:
        """A pipe is opened without waiting for its writer, who may come later than the agent, or never."""
        self._parse: Callable[[bytes], Line | None] | None = None
        """How a line is read, once a line has shown it."""
        # Not sys.stdin: a thread waiting in it would bring the interpreter down with an error when the agent stops.
        from_stdin = self.path == "-"
        try:
            file = (
                0 if from_stdin else os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            )
        except OSError as error:
            raise ConfigError(
                f"source '{self.name}' cannot read {self.path}: {error.strerror}"
            ) from error
        self._file: IO[bytes] = os.fdopen(file, "rb", closefd=not from_stdin)
        self._is_stream = from_stdin or not stat.S_ISREG(os.fstat(file).st_mode)

    def run(self, intake: IngestQueue) -> None:
        waiting = select.poll()
        waiting.register(self._file, select.POLLIN)
        while not intake.stopped and not waiting.poll(_POLL_MS):
            pass  # a pipe has no writer yet
        os.set_blocking(self._file.fileno(), True)
        line = b""
        for line in self._lines(intake):
            if intake.stopped:
                return
            text = line.removeprefix(codecs.BOM_UTF8)
            if self._parse is None and self._is_header(text):
                continue
            record = None if self._parse is None else self._parse(text)
            if record is None:
                intake.refuse("malformed", self.name, line)
            elif not self.deliver(intake, record.x, record.y, record.id):
                return
        if line and self._parse is None:
            raise DataError(f"no line is JSON or a CSV header with the column '{self.label}'")

    def close(self) -> None:
        """What a thread may still be waiting for, a stream, is left to the end of the process."""
        if not self._is_stream:
            self._file.close()

    def _lines(self, intake: IngestQueue) -> Iterator[bytes]:
        """Lines of bounded length; what is longer is no sample and is skipped without being held in memory."""
        limit = 4096 + 32 * intake.sample_bytes
        while line := self._file.readline(limit):
            if len(line) == limit and not line.endswith(b"\n"):
                intake.refuse("oversized", self.name, line)
                while line and not line.endswith(b"\n"):
                    line = self._file.readline(limit)
            elif line.strip():
                yield line

    def _is_header(self, line: bytes) -> bool:
        """Learns from the first line that tells it how all are read; whether that line is a CSV's header.

        A stream may begin with anything, so nothing there ends the source. A file without its column is a mistake.
        """
        is_csv = self.path.endswith(".csv") if self.format is None else self.format == "csv"
        if self.format == "json" or (not is_csv and line.lstrip().startswith(b"{")):
            self._parse = parse_json
            return False
        header = [column.strip() for column in _row(line)]
        if self.label in header:
            label, name = header.index(self.label), header.index("id") if "id" in header else None
            features = [i for i in range(len(header)) if i not in (label, name)]

            def parse(text: bytes) -> Line | None:
                return self._parse_csv(features, label, name, text)

            self._parse = parse
            return True
        if is_csv and not self._is_stream:
            raise ConfigError(
                f"source '{self.name}' has no column '{self.label}': its header is {header[:20]}"
            )
        return False

    def _parse_csv(
        self, features: list[int], label: int, name: int | None, line: bytes
    ) -> Line | None:
        row = _row(line)
        try:
            x = [float(row[i]) for i in features]
            return Line(x, float(row[label]), None if name is None else _csv_id(row[name]))
        except (ValueError, IndexError):
            return None


def _csv_id(text: str) -> int | str:
    """A CSV has no types: digits as a whole number is written are that number, all else is text."""
    if len(text) <= 40 and text.isascii() and text.isdigit() and str(int(text)) == text:
        return int(text)
    return text


def _row(line: bytes) -> list[str]:
    """The fields of one line, none if it has none; each line is one record, so that a stray quote costs no other."""
    try:
        return next(csv.reader([line.decode(errors="replace").rstrip("\r\n")], strict=True), [])
    except csv.Error:
        return []
