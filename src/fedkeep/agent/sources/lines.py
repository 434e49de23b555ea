"""JSON lines or CSV from a file, a pipe or standard input."""

import codecs
import csv
import os
import select
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Literal

from fedkeep.agent.arrivals import IngestQueue, Source
from fedkeep.agent.record_fields import FieldNames, Record
from fedkeep.core.errors import ConfigError, DataError

_POLL_MS, _CHUNK_BYTES = 200, 1 << 16


@dataclass
class LinesSource(Source):
    """Reads to the end of the file; then the agent goes on without it. A named pipe has no end.

    A file or pipe has no way back: it waits while the agent cannot keep up, and whoever writes into
    a pipe is held back.

    A JSON line is `{"x": [...], "y": 3, "id": "any name", "time": "2026-03-01T12:00:00Z"}`, or has
    these under other names; a CSV has a header with the columns `y` and `id`. A sample whose label
    comes later has no `y`, or an empty one; its label comes with the `id` and without numbers.
    """

    path: str = "-"
    """A file or named pipe; "-" is standard input."""
    format: Literal["json", "csv"] | None = None
    """None: CSV if the path ends in .csv, else as the first line tells that begins with a brace
    or names the label."""
    label: str = "y"
    """The CSV column that holds the label; `id` is the optional column of names, all others are
    features in order."""
    fields: dict[str, str] = field(default_factory=dict)
    """Where JSON that is not ours has `x`, `y`, `id` and `time`: `{ x = "payload.values" }`."""

    def __post_init__(self) -> None:
        self._names = FieldNames(self.fields)

    def open(self) -> None:
        """Open a pipe without waiting for its writer, who may come later, or never."""
        self._parse: Callable[[bytes], Record | None] | None = None
        """How a line is read, once a line has shown it."""
        # Not sys.stdin: a thread waiting in it would bring the interpreter down with an error when
        # the agent stops.
        from_stdin = self.path == "-"
        try:
            file = (
                0 if from_stdin else os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            )
        except OSError as error:
            raise ConfigError(
                f"source '{self.name}' cannot read {self.path}: {error.strerror}"
            ) from error
        self._file: IO[bytes] = os.fdopen(file, "rb", buffering=0, closefd=not from_stdin)
        self._reads = False
        mode = os.fstat(file).st_mode
        self._is_stream = from_stdin or not stat.S_ISREG(mode)
        self._is_named_pipe = not from_stdin and stat.S_ISFIFO(mode)

    def run(self, intake: IngestQueue) -> None:
        """Read to the end, or until the intake is stopped."""
        self._reads = True
        try:
            self._read(intake)
        finally:
            self._reads = False

    def _read(self, intake: IngestQueue) -> None:
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
            elif not self.deliver_record(intake, record):
                return
        if line and self._parse is None:
            raise DataError(f"no line is JSON or a CSV header with the column '{self.label}'")

    def close(self) -> None:
        """Close the file, unless a thread is still waiting for it.

        Then it is left to the process.
        """
        if not self._reads:
            self._file.close()

    def _lines(self, intake: IngestQueue) -> Iterator[bytes]:
        """Lines of bounded length.

        What is longer is no sample and is skipped without being held in memory.
        """
        limit = intake.form.longest_json
        pending, skips = b"", False
        for chunk in self._chunks(intake):
            *whole, pending = (pending + chunk).split(b"\n")
            for line in whole:
                if skips:
                    skips = False  # its end, at last
                elif len(line) >= limit:
                    intake.refuse("oversized", self.name, line)
                elif line.strip():
                    yield line
            if len(pending) >= limit and not skips:
                intake.refuse("oversized", self.name, pending)
                skips = True
            pending = b"" if skips else pending
        if pending.strip():
            yield pending

    def _chunks(self, intake: IngestQueue) -> Iterator[bytes]:
        """Return what comes, until the stream ends or the intake is stopped.

        Nothing is read ahead of that.
        """
        waiting = select.poll()
        waiting.register(self._file, select.POLLIN)
        while not intake.stopped:
            # A pipe may have no writer yet, or a silent one.
            if not waiting.poll(_POLL_MS):
                continue
            try:
                chunk = os.read(self._file.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                continue  # the last writer went, and another has just come
            if chunk:
                yield chunk
            elif intake.ends or not self._is_named_pipe:
                return
            else:
                yield b"\n"  # what a writer left unfinished is not continued by the next
                waiting.unregister(self._file)
                self._reopen()
                waiting.register(self._file, select.POLLIN)

    def _reopen(self) -> None:
        """Open a named pipe for its next writer; what it wrote already waits in the pipe."""
        handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._file.close()
        self._file = os.fdopen(handle, "rb", buffering=0)

    def _is_header(self, line: bytes) -> bool:
        """Learns from the first line that tells it how all are read.

        Whether that line is a CSV's header.

        A stream may begin with anything, so nothing there ends the source. A file without its
        column is a mistake.
        """
        is_csv = self.path.endswith(".csv") if self.format is None else self.format == "csv"
        if self.format == "json" or (not is_csv and line.lstrip().startswith(b"{")):
            self._parse = self._names.parse_json
            return False
        header = [column.strip() for column in _row(line)]
        if self.label in header:
            label, name = header.index(self.label), header.index("id") if "id" in header else None
            features = [i for i in range(len(header)) if i not in (label, name)]

            def parse(text: bytes) -> Record | None:
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
    ) -> Record | None:
        row = _row(line)
        try:
            filled = any(row[i].strip() for i in features)
            x = [float(row[i]) for i in features] if filled else None
            y = float(row[label]) if row[label].strip() else None
            found = None if name is None else _csv_id(row[name])
            return None if x is None and None in (y, found) else Record(x, y, found)
        except (ValueError, IndexError):
            return None


def _csv_id(text: str) -> int | str:
    """Return the id of a CSV, which has no types: what is written like a whole number is one."""
    if len(text) <= 40 and text.isascii() and text.isdigit() and str(int(text)) == text:
        return int(text)
    return text


def _row(line: bytes) -> list[str]:
    """Return the fields of one line, none if it has none.

    Each line is one record, so that a stray quote costs no other.
    """
    try:
        return next(csv.reader([line.decode(errors="replace").rstrip("\r\n")], strict=True), [])
    except csv.Error:
        return []
