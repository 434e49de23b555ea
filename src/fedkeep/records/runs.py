"""A run's JSONL file: writing, truncating on resume, reading, and following while it grows."""

import fcntl
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import msgspec

import fedkeep
from fedkeep.core.errors import DataError
from fedkeep.files import atomic_write
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
    """Return the versions that the numbers of a run may depend on."""
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
    """Return the path of the timings beside a record."""
    return path.with_suffix(".timing.jsonl")


class Recorder(AbstractContextManager["Recorder"]):
    """The writer of a run's record and of its timings.

    A new run calls `start`, a resumed one `truncate_after` with the round of its checkpoint; both
    then `write`. A resumed run writes again, byte for byte, what was cut off.

    Parameters
    ----------
    path : Path
        The record; it is locked while the recorder is open.

    Raises
    ------
    DataError
        If the record cannot be written, or another process is writing it.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from fedkeep.records import End, read_run
    >>> plain = {"config": {}, "config_hash": "", "versions": {}, "labels": ("a", "b")}
    >>> header = Header(run="fifo", method="fifo", task="toy", seed=0, devices=1, **plain)
    >>> with TemporaryDirectory() as folder:
    ...     with Recorder(Path(folder) / "fifo.jsonl") as recorder:
    ...         recorder.start(header)
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
        """Empty the file and write its first line."""
        for file in self._files:
            os.ftruncate(file, 0)
        self.write(header)

    def truncate_after(self, round_: int) -> None:
        """Drop the first line that is damaged, the end, or of a later round, and all after it."""
        for file, path in zip(self._files, self._paths, strict=True):
            length = 0
            for raw in Tail(path).read()[1]:
                known = stamp(raw)
                if known is None or known.round > round_ or known.kind == "end":
                    break
                length += len(raw) + 1
            os.ftruncate(file, length)

    def write(self, line: Line) -> None:
        """Append a line; a `Timing` goes to its own file."""
        rest = encode(line) + b"\n"
        while rest:
            rest = rest[os.write(self._files[isinstance(line, Timing)], rest) :]

    def sync(self) -> None:
        """Flush to disk; to be called before a checkpoint that relies on what was written."""
        for file in self._files:
            os.fsync(file)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(path: Path) -> int:
    """Open and lock a file to append to; a torn last line is cut off.

    The lock keeps a second process from writing to the same record.
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
    """A run as far as it is written: its lines in order, and its timings."""

    path: Path
    header: Header
    lines: tuple[Line, ...]
    timings: tuple[Timing, ...] = ()

    def of(self, kind: type[Kind]) -> tuple[Kind, ...]:
        """Return the lines of one kind."""
        return tuple(line for line in self.lines if isinstance(line, kind))

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The evaluations, in order."""
        return self.of(Evaluation)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The lines of counts, in order."""
        return self.of(Round)

    @property
    def end(self) -> End | None:
        """The last line; None for a run that is unfinished."""
        ends = self.of(End)
        return ends[-1] if ends else None


def _lines(path: Path) -> Iterator[Line]:
    """Yield the lines of known kinds; a last line without a newline is torn and skipped."""
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
    """Read the record of one run.

    Raises
    ------
    DataError
        If the file is missing, damaged, or no record.

    Examples
    --------
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
    """Return the files under `directory` that begin with a header, sorted by name."""
    return sorted(
        path for path in directory.rglob("*.jsonl") if path.is_file() and begins_with_header(path)
    )


def begins_with_header(path: Path) -> bool:
    """Return whether a file begins with a header; False also if it cannot be read."""
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError:
        return False
    return first.endswith(b"\n") and (known := stamp(first)) is not None and known.kind == "header"


def is_intact_until(path: Path, round_: int) -> bool:
    """Return whether every line of the record up to a round is undamaged."""
    try:
        for line in _lines(path):
            if not isinstance(line, Header) and line.round > round_:
                break
    except DataError:
        return False
    return True


def read_runs(directory: Path) -> list[Run]:
    """Read all runs under `directory`.

    Raises
    ------
    DataError
        If it holds none, or one is damaged.
    """
    if not directory.is_dir():
        raise DataError(
            f"{directory} is not a directory; give the one that `fedkeep run --out` wrote to"
        )
    runs = [read_run(path) for path in run_paths(directory)]
    if not runs:
        raise DataError(f"no runs in {directory}: it holds no .jsonl file that `fedkeep run` wrote")
    return runs


_PLANNED = ".planned.json"


def plan_runs(directory: Path, names: Iterable[str]) -> None:
    """Note which runs a directory will hold, besides those that were noted before.

    What follows a directory can then show how many runs are still to begin.
    """
    directory.mkdir(parents=True, exist_ok=True)
    known = sorted(planned_runs(directory) | set(names))
    with atomic_write(directory / _PLANNED) as file:
        file.write(msgspec.json.encode(known))


def planned_runs(directory: Path) -> set[str]:
    """Return the names that `plan_runs` noted; none where there is no valid note."""
    try:
        return set(msgspec.json.decode((directory / _PLANNED).read_bytes(), type=list[str]))
    except (OSError, msgspec.DecodeError):
        return set()


class Tail:
    """Reads one file while another process writes it."""

    def __init__(self, path: Path) -> None:
        self.path, self._first, self._offset = path, b"", 0

    def read(self) -> tuple[bool, list[bytes]]:
        """Read the complete lines written since the last call.

        Returns
        -------
        restarted : bool
            Whether the file was truncated or begun anew; then `lines` has all of it.
        lines : list of bytes
            Without their newlines.
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
