"""Writes a run's JSONL file line by line, and cuts it back where a run is resumed."""

import fcntl
import os
from pathlib import Path

from fedkeep.core.errors import DataError
from fedkeep.records.lines import Header, Line, Timing, encode, stamp


def timing_path(path: Path) -> Path:
    """The file beside `path` that holds the clock."""
    return path.with_suffix(".timing.jsonl")


class Recorder:
    """The one writer of a run's file, and of the clock's beside it.

    A new run calls `start`, a resumed one `truncate_after` with its checkpoint's round; both then `write`.
    What a resumed run writes again is, byte for byte, what was cut off.

    >>> from tempfile import TemporaryDirectory
    >>> from fedkeep.records import End, read_run
    >>> said = {"config": {}, "config_hash": "", "versions": {}, "labels": ("a", "b"), "devices": 1}
    >>> with TemporaryDirectory() as folder:
    ...     with Recorder(Path(folder) / "fifo.jsonl") as recorder:
    ...         recorder.start(Header(run="fifo", method="fifo", task="toy", seed=0, **said))
    ...         recorder.write(End(round=3, digest="of the model"))
    ...     read_run(Path(folder) / "fifo.jsonl").end.round
    3
    """

    def __init__(self, path: Path) -> None:
        self._paths = (path, timing_path(path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files = [_opened(each) for each in self._paths]
        except OSError as error:
            raise DataError(f"cannot write the run's record {path}: {error.strerror}") from error

    def start(self, header: Header) -> None:
        """Empties the file and writes its first line."""
        for file in self._files:
            os.ftruncate(file, 0)
        self.write(header)

    def truncate_after(self, round_: int) -> None:
        """Drops all that was written after `round_`, and the end of the run."""
        for file, path in zip(self._files, self._paths, strict=True):
            os.ftruncate(file, _length_until(path, round_))

    def write(self, line: Line) -> None:
        """Appends the line, whole; a `Timing` goes to its own file."""
        rest = encode(line) + b"\n"
        while rest:
            rest = rest[os.write(self._files[isinstance(line, Timing)], rest) :]

    def sync(self) -> None:
        """Puts on the disk what was written, to be called before a checkpoint that relies on it."""
        for file in self._files:
            os.fsync(file)

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(path: Path) -> int:
    """A file to append to; a last line that a kill tore is cut off.

    It is locked while it is open: two processes that wrote to one record would garble it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise DataError(f"{path} is being written by another process: let it finish, or stop it first") from None
    os.ftruncate(file, path.read_bytes().rfind(b"\n") + 1)
    return file


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
