"""Transactions over the store's file.

Cells are never overwritten while a root that counts them could be needed.

A commit writes new blobs into free cells, syncs, writes the other root, and syncs again. Killed at
any point, the file is what it was before or what it is after. The file has its full size from the
start, so that no commit can push it over its budget.

A commit that only puts single cells in the place of others needs no root: each new cell says that
it counts, and which one no longer does. That is one sync, and not a byte beside the cells. Such
cells stay untouched until the next root.
"""

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedkeep.agent.cells import (
    FAR,
    OVERHEAD,
    PAGE,
    SHIFT,
    Cipher,
    FileCell,
    Geometry,
    Label,
    Root,
    decode_cell,
    decode_root,
)
from fedkeep.core.errors import FedkeepError
from fedkeep.core.types import BoolArray
from fedkeep.files import put_in_place, sync, temp_path

log = logging.getLogger(__name__)
_SECTORS = (512, 4096)
_STRIDE = 1 << 18
"""Cells are read and a new file is filled about this many bytes at a time, so that opening a store
needs little memory.
"""


_HEAD = 32
"""Bytes of a label, a root or a cell that hold its checksum."""


class StoreError(FedkeepError):
    """The store's file cannot be used now; later it may."""


class FileDisk:
    """A preallocated file, readable by its owner only and open in one process at a time.

    A write may be lost or reordered until a sync returns. Where the file system can, writes go past
    the page cache in whole sectors (`O_DIRECT`): the flash then sees 512 bytes where it would see a
    page of 4,096, and no failing sync leaves anything in a cache that looks as if it were on the
    disk. A sync also fails once the path no longer leads to this file, unless the file was only
    deleted: then it is written again under its name.

    Parameters
    ----------
    path
        The file; the last part of its name must not be a link if it is to be written.
    size
        Bytes that it has at the least; None: a file that is only looked at.
    anew
        Whether it must not be there yet.
    """

    def __init__(self, path: Path, size: int | None = None, *, anew: bool = False) -> None:
        self.path = path
        self.written = self.block_bytes = self.syncs = 0
        """Since it was opened.

        Bytes handed to the file, bytes of the sectors or pages that they touch, and syncs.
        """
        self._owned = size is not None
        self._direct: int | None = None
        self._buffer: mmap.mmap | None = None
        self._sector = _SECTORS[0]
        access = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW if self._owned else os.O_RDONLY
        self._fd = os.open(path, access | os.O_CLOEXEC | os.O_EXCL * anew, 0o600)
        try:
            if size is not None:
                self._own()
                self.extend(size)
                self._open_direct()
        except BaseException:
            self.close()
            raise

    def _own(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{self.path} is in use by another agent: stop it first") from None

    def extend(self, size: int) -> None:
        """Make the file at least so long, with space that is really its own."""
        have = os.fstat(self._fd).st_size
        if have >= size:
            return
        try:
            os.posix_fallocate(self._fd, 0, size)
            # Space that was never written to is booked by the file system in pieces,
            # which take blocks of their own.
            for start in range(have, size, _STRIDE):
                self._write_buffered(start, memoryview(bytes(min(_STRIDE, size - start))))
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, have)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StoreError(
                f"no room for the {size} bytes of {self.path}: free some or lower the budget"
            ) from error
        # A new file survives a power cut only once its folder is on the disk.
        sync(self.path.parent)

    def cut(self, size: int) -> None:
        """Overwrite what lies behind so many bytes and give it back."""
        have = os.fstat(self._fd).st_size
        if have <= size:
            return
        for start in range(size, have, _STRIDE):
            self._write_buffered(start, memoryview(bytes(min(_STRIDE, have - start))))
        os.fsync(self._fd)
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    @property
    def direct(self) -> bool:
        """Whether writes go past the page cache."""
        return self._direct is not None

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes: what cannot be read is zero, and no checksum matches it."""
        try:
            data = os.pread(self._fd, length, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""
        return data.ljust(length, b"\0")

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes that the next sync brings to the disk."""
        view = memoryview(data)
        if self._direct is not None and self._write_direct(offset, view):
            return
        self._write_buffered(offset, view)

    def sync(self) -> None:
        """Bring all writes to the disk, and see to it that they are found there.

        Raises
        ------
        OSError
            Something may not be on the disk, or another file stands under this one's name.
        """
        if not self._owned:
            return
        os.fdatasync(self._fd)
        self.syncs += 1
        if not self._is_in_place():
            self._take_name_again()

    def drop_cache(self) -> None:
        """Forget what was read or written earlier.

        After a failed sync a page cache shows what no disk has.
        """
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def wipe(self) -> None:
        """Overwrite the whole file."""
        self.cut(0)

    def close(self) -> None:
        """Close the file; the lock goes with it."""
        if self._direct is not None:
            os.close(self._direct)
        self._direct = None
        os.close(self._fd)

    def _open_direct(self) -> None:
        """Find out whether, and in which pieces, the file system writes past its cache."""
        try:
            self._direct = os.open(
                f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
            )
        except OSError:
            return
        self._buffer = mmap.mmap(-1, _STRIDE)
        for self._sector in _SECTORS:
            try:
                os.preadv(self._direct, [memoryview(self._buffer)[: self._sector]], 0)
                return
            except OSError:
                continue
        os.close(self._direct)
        self._direct = None

    def _write_buffered(self, offset: int, view: memoryview) -> None:
        self.block_bytes += -(-(offset + len(view)) // PAGE) * PAGE - offset // PAGE * PAGE
        while view:
            done = os.pwrite(self._fd, view, offset)
            self.written += done
            offset += done
            view = view[done:]

    def _write_direct(self, offset: int, view: memoryview) -> bool:
        """Write whole sectors, those at the edges with what is in them.

        False if that cannot be done here.
        """
        assert self._direct is not None
        assert self._buffer is not None
        sector, end = self._sector, offset + len(view)
        if -(-end // sector) * sector > self.size:
            return False
        start = offset // sector * sector
        while start < end:
            stop = min(start + len(self._buffer), -(-end // sector) * sector)
            low, high = max(start, offset), min(stop, end)
            if start < low:
                self._buffer[:sector] = self.read(start, sector)
            if high < stop and (stop - sector > start or start == low):
                self._buffer[stop - sector - start : stop - start] = self.read(
                    stop - sector, sector
                )
            self._buffer[low - start : high - start] = view[low - offset : high - offset]
            part = memoryview(self._buffer)[: stop - start]
            try:
                done = os.pwrite(self._direct, part, start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)
                self._direct = None
                return False
            self.block_bytes += done
            self.written += max(0, min(high, start + done) - low)
            if done < sector:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            start += done - done % sector
        return True

    def _is_in_place(self) -> bool:
        """Whether the path leads to the file that is written."""
        try:
            named = self.path.stat()
        except FileNotFoundError:
            return False
        own = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    def _take_name_again(self) -> None:
        """Write a deleted file again, byte by byte; another file under its name is left alone."""
        if os.path.lexists(self.path):
            reason = f"{self.path} was replaced by another file: put it back, or restart the agent"
            raise OSError(errno.ESTALE, reason)
        new = temp_path(self.path)
        copy = self._copy_at(new)
        try:
            for start in range(0, self.size, _STRIDE):
                copy.write(start, self.read(start, min(_STRIDE, self.size - start)))
            copy.sync()
            put_in_place(new, self.path)
        except BaseException:
            with suppress(OSError):
                copy.wipe()
            copy.close()
            new.unlink(missing_ok=True)
            raise
        if os.fstat(self._fd).st_nlink == 0:  # else it was moved, and is its owner's
            self.wipe()
        log.warning("%s was deleted under the agent: written again, with all it held", self.path)
        self.written += copy.written
        self.block_bytes += copy.block_bytes
        self.close()
        self._fd, self._direct, self._buffer = copy._fd, copy._direct, copy._buffer
        self._sector = copy._sector

    def _copy_at(self, new: Path) -> "FileDisk":
        """Make a file of the same size; on a disk without room it may succeed later."""
        try:
            return FileDisk(new, self.size, anew=True)
        except FileExistsError:
            raise
        except (OSError, StoreError) as error:
            new.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


class Blob(NamedTuple):
    """Bytes of one kind, stored whole or not at all."""

    number: int
    kind: int
    data: bytes


@dataclass
class Damage:
    """What could not be read when the file was opened."""

    cells: int = 0
    blobs: int = 0
    roots: bool = False
    """No root was whole: all whole cells were taken, those of replaced samples included."""
    rolled_back: bool = False
    """The newest root was lost in both places.

    The one before it counts, and all whole cells that are newer.
    """
    root_copies: int = 0
    """Roots that were lost in one place only, which costs nothing."""
    label: bool = False

    def __bool__(self) -> bool:
        return bool(self.cells or self.blobs or self.roots or self.rolled_back or self.label)

    def __str__(self) -> str:
        lines = [
            f"{self.cells} cells cannot be read" if self.cells else "",
            "the label is lost" if self.label else "",
        ]
        if self.roots:
            lines.append(
                "no root is whole: what single cells hold is taken, replaced samples included"
            )
        elif self.rolled_back:
            lines.append(
                "the newest root is lost: rolled back to the one before it, with all that "
                "newer cells hold"
            )
        return "; ".join(filter(None, lines)) or f"{self.blobs} blobs are incomplete"


class CellFile:
    """Blobs in a fixed file, changed by atomic transactions."""

    def __init__(self, disk: FileDisk, geometry: Geometry, cipher: Cipher | None = None) -> None:
        self.disk, self.geometry, self._cipher = disk, geometry, cipher
        self.damage = Damage()
        self.room = geometry.cell_size - OVERHEAD[cipher is not None]
        """Bytes of a blob per cell."""
        self._live: BoolArray = np.zeros(geometry.cells, dtype=bool)
        self._soiled = self._live.copy()
        """Cells that may hold something, whether it counts or not."""
        self._young = self._live.copy()
        """Cells written since the last root: not to be written to before the next."""
        self._places: dict[int, int | list[int]] = {}
        """The cells of each blob that counts; of one cell, as nearly all are, its number alone."""
        self._sequence = self._half = self._cursor = 0
        self._in_doubt = self._wipe_due = False
        self._heads = b""
        """How label and newest root began when they were last read or written."""
        self._last_written: tuple[int, bytes] | None = None
        """The cell that was written last, and how it begins."""

    @property
    def bytes_used(self) -> int:
        """Bytes of the cells that count, with everything around them."""
        return self.geometry.size - int((~self._live).sum()) * self.geometry.cell_size

    def write_label(self, label: Label) -> None:
        """Put the label at both ends of the file, one after the other.

        A power cut may cost one of them.
        """
        for place in (0, self.geometry.label_copy):
            self.disk.write(place, label.encode())
            self.disk.sync()
        self._heads = self._read_heads()

    def format(self, label: Label) -> None:
        """Make an empty store, with both its roots: a root that is missing later was lost."""
        self._write_root(self._live)
        self._write_root(self._live)
        self.write_label(label)

    def load(self) -> list[Blob]:
        """All blobs that count and are whole.

        Also makes the file ready for the next commit, and notes its damage.

        It syncs first: what an earlier process left in the page cache must be on the disk before
        anything builds on it.
        """
        self.disk.sync()
        self.disk.drop_cache()
        roots, cells = self._read_roots(), dict(self._scan())
        written = [root.sequence for root in roots.values()] + [
            cell.sequence for cell in cells.values()
        ]
        self._sequence = max(written, default=-1)
        if not roots:
            return self._assemble(cells)
        self._half = max(roots, key=lambda half: roots[half].sequence)
        root = roots[self._half]
        self._heads = self._read_heads()
        self._wipe_due = root.wipe
        bits = np.frombuffer(root.bitmap, np.uint8)
        counted = np.unpackbits(bits, count=self.geometry.cells).astype(bool)
        newer = [index for index, cell in cells.items() if cell.sequence > root.sequence]
        for index in sorted(newer, key=lambda i: (cells[i].sequence, i)):
            if not (cells[index].light or self.damage.rolled_back):
                continue
            counted[index] = self._young[index] = True
            freed = cells[index].frees
            if freed is not None and freed < len(counted):
                counted[freed] = False
        found = {index: cell for index, cell in cells.items() if counted[index]}
        self.damage.cells = int(counted.sum()) - len(found)
        return self._assemble(found)

    def reload(self) -> list[Blob]:
        """Return all blobs as of the last commit that succeeded; for use after one that failed."""
        self.disk.drop_cache()
        return self._assemble({index: cell for index, cell in self._scan() if self._live[index]})

    def _read_roots(self) -> dict[int, Root]:
        """Read the roots that are whole in at least one place, by half.

        A root is torn by a crash in its first place only: the copy is written once the first is on
        the disk.
        """
        found, copies, geometry = {}, 0, self.geometry
        for half in (0, 1):
            areas = [
                self.disk.read(geometry.root(half, copy), geometry.root_size) for copy in (0, 1)
            ]
            whole = [
                root for area in areas if (root := decode_root(area, geometry.cells)) is not None
            ]
            if whole:
                found[half] = max(whole, key=lambda root: root.sequence)
                copies += len(areas) - len(whole)
        self.damage = Damage(roots=not found, rolled_back=len(found) == 1, root_copies=copies)
        return found

    def _scan(self) -> Iterator[tuple[int, FileCell]]:
        """Yield the cells that are whole, whether they count or not."""
        size = self.geometry.cell_size
        step = max(1, _STRIDE // size)
        for start in range(0, self.geometry.cells, step):
            count = min(step, self.geometry.cells - start)
            chunk = self.disk.read(self.geometry.cell(start), count * size)
            soiled = np.frombuffer(chunk, np.uint8).reshape(count, size).any(axis=1)
            self._soiled[start : start + count] = soiled
            for index in np.flatnonzero(soiled).tolist():
                cell = decode_cell(chunk[index * size : (index + 1) * size])
                if cell is not None:
                    yield start + index, cell

    def _assemble(self, cells: dict[int, FileCell]) -> list[Blob]:
        """Put together the blobs of which no part is missing or was tampered with.

        They are what counts from now on.
        """
        parts: dict[int, dict[int, int]] = {}
        for index, cell in cells.items():
            parts.setdefault(cell.blob, {})[cell.part] = index
        self._live[:] = False
        self._places.clear()
        blobs = []
        for number, places in sorted(parts.items()):
            found = [cells[places[part]] for part in sorted(places)]
            opened = [
                self._cipher.unseal(c.data, _bound_to(c)) if self._cipher else c.data for c in found
            ]
            pieces = [piece for piece in opened if piece is not None]
            if len(pieces) != found[0].parts:
                self.damage.blobs += 1
                continue
            blobs.append(Blob(number, found[0].kind, b"".join(pieces)))
            self._set_places(number, list(places.values()))
            self._live[self._cells_of(number)] = True
        return blobs

    def commit(
        self,
        add: Sequence[tuple[int, bytes]],
        remove: Iterable[int],
        *,
        wipe: bool = False,
        atomic: bool = True,
        below: int | None = None,
    ) -> list[int]:
        """Add blobs (kind, data) and remove others, all or nothing.

        Returns the new blobs' numbers.

        With `wipe`, what is removed, now or earlier, is also overwritten before the call returns.
        Where it need not be `atomic`, a crash in the middle may leave some of the new blobs, each
        in the place of the removed one that stands where it does in the list. With `below`, only
        cells of lower numbers are written. On an OSError the transaction did not happen as far as
        the caller knows, and the next commit may succeed.
        """
        self._require_own()
        cells = self._lay_out(add)
        taken = self._places_for(cells, below)
        removed = [number for number in remove if number in self._places]
        freed = [index for number in removed for index in self._cells_of(number)]
        live = self._live.copy()
        live[taken] = True
        live[freed] = False
        single = len(freed) <= len(cells) and all(cell.parts == 1 for cell in cells)
        if single and not (atomic or wipe or self._wipe_due):
            self._in_doubt = True
            light = [cell._replace(light=True, frees=i) for cell, i in zip_longest(cells, freed)]
            self._write_cells(taken, [cell.encode() for cell in light])
            self._in_doubt = False
            self._young[taken] = True
        else:
            self._write_cells(taken, [cell.encode() for cell in cells])
            self._wipe_due = self._wipe_due or wipe
            self._write_root(live)
        self._live = live
        for number in removed:
            del self._places[number]
        places: dict[int, list[int]] = {}
        for index, cell in zip(taken, cells, strict=True):
            places.setdefault(cell.blob, []).append(index)
        for number, indices in places.items():
            self._set_places(number, indices)
        if self._wipe_due:
            self._wipe_free()
        return sorted(places)

    def discard(self, numbers: Iterable[int]) -> None:
        """Lets go of blobs that were salvaged but never counted together, without needing room.

        Writes a root.
        """
        for number in numbers:
            self._live[self._cells_of(number)] = False
            del self._places[number]
        self._write_root(self._live)

    def _require_own(self) -> None:
        """Raise OSError where another program has cut the file or written over it.

        A copy of an earlier day lacks the cell that was written last, another store has another
        label, and a file that was cut has neither. What stands there now is left alone.
        """
        own = self._in_doubt or not self._heads or self._read_heads() == self._heads
        if self._last_written is not None:
            index, begins = self._last_written
            own = own and self.disk.read(self.geometry.cell(index), _HEAD) == begins
        if not own:
            raise OSError(
                errno.ESTALE,
                "another program has written over the file: take out what is in memory by "
                "`fedkeep agent pull`, then restart the agent",
            )

    def _read_heads(self) -> bytes:
        root = self.geometry.root(self._half)
        return self.disk.read(0, _HEAD) + self.disk.read(root, _HEAD)

    def _lay_out(self, add: Sequence[tuple[int, bytes]]) -> list[FileCell]:
        """Return the cells of new blobs, sealed, those that go far away last.

        A root is written first where one is due.

        After a commit whose fate is unknown it makes what was before the newest again, before any
        cell is reused; and where too few cells are left it gives back those that light commits have
        freed of each other's.
        """
        split = [
            [data[i : i + self.room] for i in range(0, max(1, len(data)), self.room)]
            for _, data in add
        ]
        if self._in_doubt or np.sum(~self._live & ~self._young) < sum(map(len, split)):
            self._write_root(self._live)
        self._sequence += 1
        cells = []
        first = self._sequence << SHIFT
        for number, ((kind, _), pieces) in enumerate(zip(add, split, strict=True), first):
            for part, piece in enumerate(pieces):
                cell = FileCell(kind, number, part, len(pieces), piece)
                sealed = self._cipher.seal(piece, _bound_to(cell)) if self._cipher else piece
                cells.append(cell._replace(data=sealed))
        return sorted(cells, key=lambda cell: cell.kind == FAR)

    def last_cell(self, number: int) -> int:
        """Return the highest cell of a blob that counts."""
        return max(self._cells_of(number))

    def _cells_of(self, number: int) -> list[int]:
        """Return the cells of a blob."""
        places = self._places[number]
        return [places] if isinstance(places, int) else places

    def _set_places(self, number: int, cells: list[int]) -> None:
        """Note the cells of a blob; a list for each sample would take a megabyte."""
        self._places[number] = cells[0] if len(cells) == 1 else cells

    def take_label(self, label: Label) -> None:
        """Take on the geometry of a label, whose cells and roots have the same sizes.

        What counts must lie within it.

        Roots and label are written at the new end first, so that the label at the file's head
        decides at once.
        """
        new, count = label.geometry, min(label.geometry.cells, self.geometry.cells)
        live = np.zeros(new.cells, dtype=bool)
        live[:count] = self._live[:count]
        self.disk.extend(new.size)
        for half in (0, 1):
            self._sequence += 1
            root = Root(self._sequence, np.packbits(live).tobytes(), self._wipe_due)
            self.disk.write(new.root(half, 1), root.encode(new.cells))
        for place in (new.label_copy, 0):
            self.disk.write(place, label.encode())
            self.disk.sync()
        self.geometry, self._live, self._half, self._cursor = new, live, 1, 0
        self._last_written = None
        self._soiled, self._young = np.ones_like(live), np.zeros_like(live)
        for _ in range(2):
            self._write_root(live)

    def _places_for(self, cells: list[FileCell], below: int | None = None) -> list[int]:
        """Free cells, going round the file so that it wears evenly."""
        free = np.flatnonzero((~self._live & ~self._young)[:below])
        if len(free) < len(cells):
            raise StoreError(
                f"the store's budget has no room for {len(cells)} more cells: raise it or "
                "lower the capacity"
            )
        free = np.roll(free, -int(np.searchsorted(free, self._cursor)))
        near = sum(cell.kind != FAR for cell in cells)
        if near:
            self._cursor = int(free[near - 1]) + 1
        rest = free[near:]
        far = np.roll(rest, len(rest) // 2)[: len(cells) - near]
        return [*np.sort(free[:near]).tolist(), *np.sort(far).tolist()]

    def _write_cells(self, places: list[int], contents: list[bytes]) -> None:
        """Neighbouring cells go in one call; what is left of a cell is zero."""
        if not places:
            return
        self._soiled[places] = True
        self._last_written = None
        size = self.geometry.cell_size
        start = 0
        for end in range(1, len(places) + 1):
            if end == len(places) or places[end] != places[end - 1] + 1:
                run = b"".join(content.ljust(size, b"\0") for content in contents[start:end])
                self.disk.write(self.geometry.cell(places[start]), run)
                start = end
        self.disk.sync()
        self._last_written = places[-1], contents[-1].ljust(_HEAD, b"\0")[:_HEAD]

    def _write_root(self, live: BoolArray) -> None:
        """Goes into the older half.

        Until its sync returns, either root may be the one on the disk.
        """
        self._sequence += 1
        bitmap = np.packbits(live).tobytes()
        root = Root(self._sequence, bitmap, self._wipe_due).encode(self.geometry.cells)
        self._in_doubt = True
        self.disk.write(self.geometry.root(1 - self._half), root)
        self.disk.sync()
        self.disk.write(self.geometry.root(1 - self._half, 1), root)
        self._in_doubt = False
        self._half = 1 - self._half
        self._heads = self._read_heads()
        self._young[:] = False

    def _wipe_free(self) -> None:
        """Overwrite every free cell that ever held something, then say so in a new root."""
        targets = np.flatnonzero(self._soiled & ~self._live).tolist()
        self._write_cells(targets, [b""] * len(targets))
        self._soiled[targets] = False
        self._wipe_due = False
        self._write_root(self._live)


def _bound_to(cell: FileCell) -> bytes:
    """Return what a sealed cell opens with, and no other does."""
    return f"{cell.kind}/{cell.blob}/{cell.part}/{cell.parts}".encode()
