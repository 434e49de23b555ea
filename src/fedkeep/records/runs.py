"""A run's JSONL file: written line by line, cut back where a run is resumed, read back, and followed while it grows."""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import fedkeep
from fedkeep.core.errors import DataError
from fedkeep.records.lines import (
    End,
    Evaluation,
    Header,
    Line,
    Round,
    Timing,
    decode,
    encode,
    is_intact,
    stamp,
)

Kind = TypeVar("Kind", bound=Line)


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on besides its options."""
    found = {
        "fedkeep": fedkeep.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for package in ("numpy", "torch"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def timing_path(path: Path) -> Path:
    """The file beside `path` that holds the clock."""
    return path.with_suffix(".timing.jsonl")


class Recorder(AbstractContextManager["Recorder"]):
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
        """Drops all from the first line on that is damaged, ends the run or belongs to a round after `round_`."""
        for file, path in zip(self._files, self._paths, strict=True):
            length = 0
            for raw in Tail(path).read()[1]:
                known = stamp(raw)
                if known is None or known.round > round_ or known.kind == "end":
                    break
                length += len(raw) + 1
            os.ftruncate(file, length)

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
        raise DataError(
            f"{path} is being written by another process: let it finish, or stop it first"
        ) from None
    os.ftruncate(file, path.read_bytes().rfind(b"\n") + 1)
    return file


@dataclass(frozen=True)
class Run:
    """A run as far as it is written: all lines in their order, and the clock's."""

    path: Path
    header: Header
    lines: tuple[Line, ...]
    timings: tuple[Timing, ...] = ()

    def of(self, kind: type[Kind]) -> tuple[Kind, ...]:
        return tuple(line for line in self.lines if isinstance(line, kind))

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return self.of(Evaluation)

    @property
    def rounds(self) -> tuple[Round, ...]:
        return self.of(Round)

    @property
    def end(self) -> End | None:
        """The last line, or None of a run that is still going or was stopped."""
        ends = self.of(End)
        return ends[-1] if ends else None


def _lines(path: Path) -> Iterator[Line]:
    """The lines of known kinds; a last line without its newline was torn by a kill and does not count."""
    checked = False
    for number, raw in enumerate(Tail(path).read()[1], start=1):
        if checked and is_intact(raw) is None:
            raise DataError(
                f"{path}, line {number}: damaged, it has lost its checksum; run again with --resume"
            )
        checked = checked or is_intact(raw) is not None
        try:
            line = decode(raw)
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        if line is not None:
            yield line


def read_run(path: Path) -> Run:
    """The run recorded in one file: its header, its lines, its end.

    >>> read_run(Path("runs/none.jsonl"))
    Traceback (most recent call last):
    fedkeep.core.errors.DataError: cannot read runs/none.jsonl: No such file or directory
    """
    try:
        lines = tuple(_lines(path))
        beside = timing_path(path)
        timings = tuple(_lines(beside)) if beside.is_file() else ()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not lines or not isinstance(lines[0], Header):
        raise DataError(f"{path} is not the record of a run: its first line is no header")
    return Run(path, lines[0], lines, tuple(line for line in timings if isinstance(line, Timing)))


def run_paths(directory: Path) -> list[Path]:
    """The files under `directory` that begin as the record of a run, in the order of their names."""
    return sorted(
        path for path in directory.rglob("*.jsonl") if path.is_file() and begins_with_header(path)
    )


def begins_with_header(path: Path) -> bool:
    """False also of a file that may not be read, or is gone since it was listed."""
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError:
        return False
    return first.endswith(b"\n") and (known := stamp(first)) is not None and known.kind == "header"


def is_intact_until(path: Path, round_: int) -> bool:
    """Whether every line of the record up to a round is what was written."""
    try:
        for line in _lines(path):
            if not isinstance(line, Header) and line.round > round_:
                break
    except DataError:
        return False
    return True


def read_runs(directory: Path) -> list[Run]:
    """All runs under `directory`, which must hold at least one."""
    if not directory.is_dir():
        raise DataError(
            f"{directory} is not a directory; give the one that `fedkeep run --out` wrote to"
        )
    runs = [read_run(path) for path in run_paths(directory)]
    if not runs:
        raise DataError(f"no runs in {directory}: it holds no .jsonl file that `fedkeep run` wrote")
    return runs


class Tail:
    """Follows one file while it is written."""

    def __init__(self, path: Path) -> None:
        self.path, self._first, self._offset = path, b"", 0

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the file was begun anew or cut back since the last call, and the whole lines since then.

        After a cut all lines come again.
        """
        with self.path.open("rb") as file:
            first = file.readline()
            size = file.seek(0, 2)
            restarted = self._offset > 0 and (size < self._offset or first != self._first)
            if restarted or not first.endswith(b"\n"):
                self._offset = 0
            self._first = first
            file.seek(self._offset)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        return restarted, whole.splitlines()
