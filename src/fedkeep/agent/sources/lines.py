"""JSON lines or CSV from a file, a pipe or standard input."""

import codecs
import csv
import os
import select
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Literal

import msgspec

from fedkeep.agent.arrivals import Arrival, Sink
from fedkeep.core.errors import ConfigError, DataError

_POLL_MS = 200


@dataclass(frozen=True)
class LinesOptions:
    """A JSON line is `{"x": [...], "y": 3, "id": "any name"}`; a CSV has a header with the columns `y` and `id`."""

    name: str
    """How messages, `why` and `erase --source` call it."""
    path: str = "-"
    """A file or named pipe; "-" is standard input."""
    format: Literal["json", "csv"] | None = None
    """None: CSV if the path ends in .csv, else as the first line tells that begins with a brace or names the label."""
    label: str = "y"
    """The CSV column that holds the label; `id` is the optional column of names, all others are features in order."""
    overload: Literal["wait", "sample"] | None = None
    """When the agent cannot keep up: hold the stream back, or value an even sample. None: stdin samples, files wait."""


class Line(msgspec.Struct):
    x: list[Any]
    y: Any
    id: Any = None


_decoder = msgspec.json.Decoder(Line)


def parse_line(line: bytes) -> Line | None:
    """The sample of one JSON line; None if it is none, however deep, long or broken."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError):
        return None


class LinesSource:
    """Reads to the end of the file; then the agent goes on without it."""

    def __init__(self, options: LinesOptions, sample_bytes: int) -> None:
        self.name = options.name
        self._options = options
        self._line_limit = 4096 + 32 * sample_bytes
        self._wait = (options.overload or ("sample" if options.path == "-" else "wait")) == "wait"
        self._file: IO[bytes] | None = None
        self._is_stream = True
        self._parse: Callable[[bytes], Arrival | None] | None = None
        """How a line is read, once a line has shown it."""

    def open(self) -> None:
        """A pipe is opened without waiting for its writer, who may come later than the agent, or never."""
        if self._options.path == "-":
            # Not sys.stdin: a thread waiting in it would bring the interpreter down with an error when the agent stops.
            self._file = open(0, "rb", closefd=False)  # noqa: SIM115 - open until `close`
            return
        try:
            self._file = open(self._options.path, "rb", opener=_open_at_once)  # noqa: SIM115 - open until `close`
        except OSError as error:
            raise ConfigError(f"source '{self.name}' cannot read {self._options.path}: {error.strerror}") from error
        self._is_stream = not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    def run(self, sink: Sink) -> None:
        self._await_writer(sink)
        line = b""
        for line in self._lines(sink):
            if sink.stopped:
                return
            if self._parse is None and self._is_header(line.removeprefix(codecs.BOM_UTF8)):
                continue
            arrival = None if self._parse is None else self._parse(line.removeprefix(codecs.BOM_UTF8))
            if arrival is not None:
                sink.offer(arrival, wait=self._wait)
            else:
                sink.refuse("malformed", self.name, line)
        if line and self._parse is None:
            raise DataError(f"no line is JSON or a CSV header with the column '{self._options.label}'")

    def close(self) -> None:
        """What a thread may still be waiting for, a stream, is left to the end of the process."""
        if self._file is not None and not self._is_stream:
            self._file.close()

    def _await_writer(self, sink: Sink) -> None:
        assert self._file is not None
        waiting = select.poll()
        waiting.register(self._file, select.POLLIN)
        while not sink.stopped and not waiting.poll(_POLL_MS):
            pass
        os.set_blocking(self._file.fileno(), True)

    def _lines(self, sink: Sink) -> Iterator[bytes]:
        """Lines of bounded length; what is longer is no sample and is skipped without being held in memory."""
        assert self._file is not None
        while line := self._file.readline(self._line_limit):
            if len(line) == self._line_limit and not line.endswith(b"\n"):
                sink.refuse("oversized", self.name, line)
                while line and not line.endswith(b"\n"):
                    line = self._file.readline(self._line_limit)
            elif line.strip():
                yield line

    def _is_header(self, line: bytes) -> bool:
        """Learns from the first line that tells it how all are read; whether that line is a CSV's header.

        A stream may begin with anything, so nothing there ends the source. A file without its column is a mistake.
        """
        is_csv = self._options.path.endswith(".csv") if self._options.format is None else self._options.format == "csv"
        if self._options.format == "json" or (not is_csv and line.lstrip().startswith(b"{")):
            self._parse = self._from_json
            return False
        header = [column.strip() for column in _row(line) or []]
        if self._options.label in header:
            label = header.index(self._options.label)
            name = header.index("id") if "id" in header else None
            features = [i for i in range(len(header)) if i not in (label, name)]
            self._parse = partial(self._from_csv, features, label, name)
            return True
        if is_csv and not self._is_stream:
            raise ConfigError(
                f"source '{self.name}' has no column '{self._options.label}': its header is {header[:20]}"
            )
        return False

    def _from_json(self, line: bytes) -> Arrival | None:
        sample = parse_line(line)
        return None if sample is None else Arrival(sample.x, sample.y, sample.id, self.name)

    def _from_csv(self, features: list[int], label: int, name: int | None, line: bytes) -> Arrival | None:
        row = _row(line) or []
        try:
            x = [float(row[i]) for i in features]
            return Arrival(x, float(row[label]), None if name is None else row[name], self.name)
        except (ValueError, IndexError):
            return None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _row(line: bytes) -> list[str] | None:
    """The fields of one line; each line is one record, so that a stray quote costs no other."""
    try:
        return next(csv.reader([line.decode(errors="replace").rstrip("\r\n")], strict=True), [])
    except csv.Error:
        return None
