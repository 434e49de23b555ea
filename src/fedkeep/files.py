"""Files that are there whole or not at all, whatever a crash leaves of the writing."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def temp_path(path: Path) -> Path:
    """Where a file is made before it takes its name."""
    return path.with_name(path.name + ".new")


@contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file that takes its name once it is written and on the disk.

    If that fails, what was there stays.

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
    """Holds back other processes that want to be alone in the same folder, which is made if it is
    not there.

    By a file that stays: a folder itself is locked on one machine only where several share it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def put_in_place(new: Path, path: Path) -> None:
    """Renames what is complete and on the disk; returns once the name would survive a power cut,
    too.
    """
    new.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
