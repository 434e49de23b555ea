"""The few calls that the store makes on its file; tests put a failing, dying or recording disk in their place."""

import errno
import fcntl
import os
from pathlib import Path

from fedkeep.core.errors import FedkeepError
from fedkeep.files import sync

_CHUNK = 1 << 18


class StoreError(FedkeepError):
    """The store's file cannot be used now; later it may."""


class FileDisk:
    """A preallocated file, readable by its owner only and open in one process at a time; a write may be lost or
    reordered until a sync returns. Without a size, a file that is only looked at."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        self.written = 0
        """Bytes handed to the file since it was opened: what the flash has to bear."""
        self._owned = size is not None
        access = os.O_RDWR | os.O_CREAT if self._owned else os.O_RDONLY
        self._fd = os.open(path, access | os.O_CLOEXEC, 0o600)
        try:
            if size is not None:
                self._own(size)
        except BaseException:
            self.close()
            raise

    def _own(self, size: int) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{self.path} is in use by another agent: stop it first") from None
        have = os.fstat(self._fd).st_size
        if have >= size:
            return
        try:
            os.posix_fallocate(self._fd, 0, size)
            # Space that was never written to is booked by the file system in pieces, which take blocks of their own.
            for start in range(have, size, _CHUNK):
                self.write(start, bytes(min(_CHUNK, size - start)))
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StoreError(f"no room for the {size} bytes of {self.path}: free some or lower the budget") from error
        sync(self.path.parent)  # a new file survives a power cut only once its folder is on the disk

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes: what cannot be read is zero, and no checksum matches it."""
        try:
            data = os.pread(self._fd, length, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""
        return data.ljust(length, b"\0")

    def write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, offset)
            self.written += done
            offset += done
            view = view[done:]

    def sync(self) -> None:
        if self._owned:
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
