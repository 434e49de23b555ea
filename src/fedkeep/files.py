"""Atomic and durable writes, and locks on folders."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedkeep.core.errors import ConfigError


def temp_path(path: Path) -> Path:
    """Return the path under which a file is written before it is renamed to `path`."""
    return path.with_name(path.name + ".new")


@contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Write a file that replaces `path` once it is complete and on disk.

    If anything fails, what was at `path` stays and the unfinished file is removed.

    Parameters
    ----------
    path : Path
        The file to replace or create.
    mode : int
        Permissions of a new file.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder) / "note.txt") as file:
    ...         _ = file.write(b"whole")
    ...     [(found.name, found.read_text()) for found in Path(folder).iterdir()]
    [('note.txt', 'whole')]
    """
    new = temp_path(path)
    access = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    if new.is_symlink():  # where it leads is nobody's business here
        new.unlink()
    try:
        with os.fdopen(os.open(new, access, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put_in_place(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, which is created if it does not exist.

    The lock is on a file `.lock` that stays: a lock on the folder itself would hold on one machine
    only where several share a file system.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def put_in_place(new: Path, path: Path) -> None:
    """Rename a complete, synced file; on return the new name survives a power cut."""
    new.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def folder_for_records(directory: object) -> Path:
    """Make the folder for records, so that a failure is reported before anything runs.

    Raises
    ------
    ConfigError
        If it is no path, or cannot be made.
    """
    if not isinstance(directory, str | Path):
        raise ConfigError(f"the folder for records must be a path, got {directory!r}")
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot keep records in {directory}: {error.strerror}"
        raise ConfigError(f"{why}; choose another folder") from error
    return Path(directory)
