"""Writes a run's JSONL file line by line, and cuts it back where a run is resumed."""

import fcntl
import os
from pathlib import Path

from fedkeep.core.errors import DataError
from fedkeep.records.lines import Header, Line, Timing, encode, stamp


def timing_path(path: Path) -> Path:
    """The file beside `path` that holds the clock."""
    return path.with_suffix(".timing.jsonl")


class _File:
    """Appends whole lines, each in one write; a last one that a kill tore is cut off on opening.

    It is locked while it is open: two processes that wrote to one record would garble it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise DataError(f"{path} is being written by another process: let it finish, or stop it first") from None
        os.ftruncate(self._descriptor, path.read_bytes().rfind(b"\n") + 1)

    def append(self, line: Line) -> None:
        rest = encode(line) + b"\n"
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def truncate_after(self, round_: int) -> None:
        os.ftruncate(self._descriptor, _length_until(self._path, round_))

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _length_until(path: Path, round_: int) -> int:
    """The bytes before the first line that is damaged, ends the run or belongs to a round after `round_`."""
    length = 0
    with path.open("rb") as file:
        for raw in file:
            known = stamp(raw)
            if known is None or known.round > round_ or known.kind == "end":
                break
            length += len(raw)
    return length


class Recorder:
    """The one writer of a run's file, and of the clock's beside it.

    A new run calls `start`, a resumed one `truncate_after` with its checkpoint's round; both then `write`.
    What a resumed run writes again is, byte for byte, what was cut off.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._run = _File(path)
            self._timing = _File(timing_path(path))
        except OSError as error:
            raise DataError(f"cannot write the run's record {path}: {error.strerror}") from error

    def start(self, header: Header) -> None:
        """Empties the file and writes its first line."""
        self._run.clear()
        self._timing.clear()
        self.write(header)

    def truncate_after(self, round_: int) -> None:
        """Drops all that was written after `round_`, and the end of the run."""
        self._run.truncate_after(round_)
        self._timing.truncate_after(round_)

    def write(self, line: Line) -> None:
        """Appends the line; a `Timing` goes to its own file."""
        (self._timing if isinstance(line, Timing) else self._run).append(line)

    def sync(self) -> None:
        """Puts on the disk what was written, to be called before a checkpoint that relies on it."""
        self._run.sync()
        self._timing.sync()

    def close(self) -> None:
        self._run.close()
        self._timing.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
