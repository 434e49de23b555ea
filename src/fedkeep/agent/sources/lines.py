"""JSON lines or CSV from a file, a pipe or standard input."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from fedkeep.agent.arrivals import Arrival, Sink
from fedkeep.core.errors import ConfigError


@dataclass(frozen=True)
class LinesOptions:
    """A JSON line is `{"x": [...], "y": 3, "id": "any name"}`; a CSV has a header with the columns `y` and `id`."""

    name: str
    """How messages, `why` and `erase --source` call it."""
    path: str = "-"
    """A file or named pipe; "-" is standard input."""
    format: Literal["json", "csv"] | None = None
    """None: CSV if the path ends in .csv or the first line does not begin with a brace."""
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
        live = options.path == "-"
        self._wait = (options.overload or ("sample" if live else "wait")) == "wait"
        self._file: IO[bytes] | None = None

    def open(self) -> None:
        if self._options.path == "-":
            # Not sys.stdin: a thread waiting in it would bring the interpreter down with an error when the agent stops.
            self._file = open(0, "rb", closefd=False)  # noqa: SIM115 - open until `close`
            return
        try:
            self._file = Path(self._options.path).open("rb")  # noqa: SIM115 - open until `close`
        except OSError as error:
            raise ConfigError(f"source '{self.name}' cannot read {self._options.path}: {error.strerror}") from error

    def run(self, sink: Sink) -> None:
        for arrival in self._arrivals(sink):
            if sink.stopped:
                return
            sink.offer(arrival, wait=self._wait)

    def close(self) -> None:
        if self._file is not None and self._options.path != "-":
            self._file.close()

    def _arrivals(self, sink: Sink) -> Iterator[Arrival]:
        lines = self._lines(sink)
        first = next((line for line in lines if line.strip()), b"")
        if self._is_csv(first):
            return self._from_csv(first, lines, sink)
        return self._from_json(chain([first], lines), sink)

    def _is_csv(self, first: bytes) -> bool:
        if self._options.format is not None:
            return self._options.format == "csv"
        return self._options.path.endswith(".csv") or not first.lstrip().startswith(b"{")

    def _lines(self, sink: Sink) -> Iterator[bytes]:
        """Lines of bounded length; what is longer is no sample and is skipped without being held in memory."""
        assert self._file is not None
        while line := self._file.readline(self._line_limit):
            if len(line) == self._line_limit and not line.endswith(b"\n"):
                sink.refuse("oversized", self.name, line)
                while line and not line.endswith(b"\n"):
                    line = self._file.readline(self._line_limit)
                continue
            yield line

    def _from_json(self, lines: Iterable[bytes], sink: Sink) -> Iterator[Arrival]:
        for line in lines:
            sample = parse_line(line)
            if sample is not None:
                yield Arrival(sample.x, sample.y, sample.id, self.name)
            elif line.strip():
                sink.refuse("malformed", self.name, line)

    def _from_csv(self, first: bytes, lines: Iterator[bytes], sink: Sink) -> Iterator[Arrival]:
        header = [column.strip() for column in _row(first) or []]
        if self._options.label not in header:
            raise ConfigError(
                f"source '{self.name}' has no column '{self._options.label}': its header is {header[:20]}"
            )
        label = header.index(self._options.label)
        name = header.index("id") if "id" in header else None
        features = [i for i in range(len(header)) if i not in (label, name)]
        for line in lines:
            row = _row(line)
            arrival = None if row is None else self._from_row(row, features, label, name)
            if arrival is not None:
                yield arrival
            elif line.strip():
                sink.refuse("malformed", self.name, line)

    def _from_row(self, row: list[str], features: list[int], label: int, name: int | None) -> Arrival | None:
        try:
            x = [float(row[i]) for i in features]
            return Arrival(x, float(row[label]), None if name is None else row[name], self.name)
        except (ValueError, IndexError):
            return None


def _row(line: bytes) -> list[str] | None:
    """The fields of one line; each line is one record, so that a stray quote costs no other."""
    try:
        return next(csv.reader([line.decode(errors="replace").rstrip("\r\n")], strict=True), [])
    except csv.Error:
        return None
