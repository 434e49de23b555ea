"""Transactions over the store's file: cells are never overwritten while a root that counts them could be needed.

A commit writes new blobs into free cells, syncs, writes the other root, and syncs again. Killed at any point, the
file is what it was before or what it is after. The file has its full size from the start, so that no commit can
push it over its budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedkeep.agent.cells import WIPE, Cell, Geometry, Label, Root, decode_cell, decode_root
from fedkeep.agent.cipher import OVERHEAD, Cipher
from fedkeep.agent.disk import Disk, StoreError

_STRIDE = 1 << 18
"""Cells are read about this many bytes at a time, so that opening a store needs little memory."""


class Blob(NamedTuple):
    """Bytes of one kind, stored whole or not at all."""

    number: int
    kind: int
    version: int
    data: bytes


@dataclass
class Damage:
    """What could not be read when the file was opened."""

    cells: int = 0
    blobs: int = 0
    roots: bool = False
    """No root was whole: all whole cells were taken, those of replaced samples included."""
    label: bool = False

    def __bool__(self) -> bool:
        return bool(self.cells or self.blobs or self.roots or self.label)


@dataclass
class Contents:
    blobs: list[Blob]
    damage: Damage = field(default_factory=Damage)


class CellFile:
    """Blobs in a fixed file, changed by atomic transactions."""

    def __init__(self, disk: Disk, geometry: Geometry, cipher: Cipher | None = None) -> None:
        self._disk = disk
        self._geometry = geometry
        self._cipher = cipher
        self.capacity = geometry.payload - (OVERHEAD if cipher else 0)
        """Bytes of a blob per cell."""
        self._live: NDArray[np.bool_] = np.zeros(geometry.cells, dtype=bool)
        self._soiled: NDArray[np.bool_] = np.zeros(geometry.cells, dtype=bool)
        self._places: dict[int, list[int]] = {}
        self._sequence = 0
        self._half = 0
        self._cursor = 0
        self._in_doubt = False
        self._wipe_due = False

    @property
    def free(self) -> int:
        return int(self._geometry.cells - self._live.sum())

    @property
    def bytes_used(self) -> int:
        """Bytes of the cells that count, with everything around them."""
        return self._geometry.size - self.free * self._geometry.cell_size

    @property
    def size(self) -> int:
        return self._geometry.size

    def cells_for(self, length: int) -> int:
        """How many cells a blob of `length` bytes takes."""
        return max(1, -(-length // self.capacity))

    def write_label(self, label: Label) -> None:
        """Puts the label at both ends of the file."""
        page = label.encode()
        self._disk.write(0, page)
        self._disk.write(self._geometry.label_copy, page)
        self._disk.sync()

    def format(self, label: Label) -> None:
        """Makes an empty store; its first root tells a new file from one that lost its roots."""
        self._write_root(self._live, 0)
        self.write_label(label)

    # -- reading ---------------------------------------------------------------------------------------------------

    def load(self) -> Contents:
        """All blobs that count and are whole; also makes the file ready for the next commit.

        It syncs first: what an earlier process left in the page cache must be on the disk before anything builds on it.
        """
        self._disk.sync()
        roots = [self._read_root(half) for half in (0, 1)]
        root = max((r for r in roots if r is not None), key=lambda r: r.sequence, default=None)
        counted = np.ones(self._geometry.cells, dtype=bool)
        if root is not None:
            self._half, self._sequence = roots.index(root), root.sequence
            self._wipe_due = bool(root.flags & WIPE)
            counted = _bits(root.bitmap, self._geometry.cells)
        cells = dict(self._scan(counted))
        damage = Damage(roots=root is None, cells=0 if root is None else int(counted.sum()) - len(cells))
        return self._assemble(cells, damage)

    def reload(self) -> Contents:
        """All blobs as of the last commit that succeeded; for use after one that failed."""
        cells = dict(self._scan(self._live.copy()))
        return self._assemble(cells, Damage(cells=int(self._live.sum()) - len(cells)))

    def _read_root(self, half: int) -> Root | None:
        area = self._disk.read(self._geometry.root(half), self._geometry.root_size)
        return decode_root(area, self._geometry.cells)

    def _scan(self, counted: NDArray[np.bool_]) -> Iterator[tuple[int, Cell]]:
        """The counted cells that are whole; the others are read too, lest a sequence number be used twice."""
        size = self._geometry.cell_size
        step = max(1, _STRIDE // size)
        for start in range(0, self._geometry.cells, step):
            count = min(step, self._geometry.cells - start)
            chunk = self._disk.read(self._geometry.cell(start), count * size)
            soiled = np.frombuffer(chunk, np.uint8).reshape(count, size).any(axis=1)
            self._soiled[start : start + count] = soiled
            for index in np.flatnonzero(soiled):
                cell = decode_cell(chunk[index * size : (index + 1) * size])
                if cell is None:
                    continue
                self._sequence = max(self._sequence, cell.sequence)
                if counted[start + index]:
                    yield start + int(index), cell

    def _assemble(self, cells: dict[int, Cell], damage: Damage) -> Contents:
        parts: dict[int, dict[int, tuple[int, Cell]]] = {}
        for index, cell in cells.items():
            parts.setdefault(cell.blob, {})[cell.part] = (index, cell)
        self._live[:] = False
        self._places.clear()
        blobs = []
        for number, found in sorted(parts.items()):
            blob = self._join(number, [found[part] for part in sorted(found)])
            if blob is None:
                damage.blobs += 1
                continue
            blobs.append(blob)
            self._places[number] = [index for index, _ in found.values()]
        self._live[[index for place in self._places.values() for index in place]] = True
        return Contents(blobs, damage)

    def _join(self, number: int, parts: list[tuple[int, Cell]]) -> Blob | None:
        first = parts[0][1]
        if len(parts) != first.parts:
            return None
        if first.parts == 1 and self._cipher is None:
            return Blob(number, first.kind, first.version, first.data)
        opened = [self._open(cell) for _, cell in parts]
        pieces = [piece for piece in opened if piece is not None]
        return Blob(number, first.kind, first.version, b"".join(pieces)) if len(pieces) == len(parts) else None

    def _open(self, cell: Cell) -> bytes | None:
        return self._cipher.unseal(cell.data, _place(cell)) if self._cipher else cell.data

    # -- writing ---------------------------------------------------------------------------------------------------

    def commit(self, add: Sequence[tuple[int, bytes]], remove: Iterable[int], *, wipe: bool = False) -> list[int]:
        """Adds blobs (kind, data) and removes others, all or nothing; returns the new blobs' numbers.

        With `wipe`, what is removed, now or earlier, is also overwritten before the call returns. On an OSError the
        transaction did not happen as far as the caller knows, and the next commit may succeed.
        """
        self._settle()
        removed = [number for number in remove if number in self._places]
        cells = self._lay_out(add)
        taken = self._take(len(cells))
        live = self._live.copy()
        live[taken] = True
        for number in removed:
            live[self._places[number]] = False
        self._write_cells(taken, cells)
        self._wipe_due = self._wipe_due or wipe
        self._write_root(live, WIPE if self._wipe_due else 0)
        self._adopt(live, taken, cells, removed)
        if self._wipe_due:
            self._wipe_free()
        return sorted({cell.blob for cell in cells})

    def _settle(self) -> None:
        """After a root whose fate is unknown, makes the old one the newest again before any cell is reused."""
        if self._in_doubt:
            self._write_root(self._live, WIPE if self._wipe_due else 0)

    def _lay_out(self, add: Sequence[tuple[int, bytes]]) -> list[Cell]:
        self._sequence += 1
        cells = []
        for offset, (kind, data) in enumerate(add):
            number = (self._sequence << 20) + offset
            pieces = [data[i : i + self.capacity] for i in range(0, len(data), self.capacity)] or [b""]
            for part, piece in enumerate(pieces):
                cell = Cell(kind, number, part, len(pieces), self._sequence, piece)
                cells.append(self._seal(cell))
        return cells

    def _seal(self, cell: Cell) -> Cell:
        if self._cipher is None:
            return cell
        return cell._replace(data=self._cipher.seal(cell.data, _place(cell)))

    def _take(self, count: int) -> list[int]:
        """Free cells, going round the file so that it wears evenly."""
        free = np.flatnonzero(~self._live)
        if len(free) < count:
            raise StoreError(f"the store's budget has no room for {count} more cells: raise it or lower the capacity")
        first = int(np.searchsorted(free, self._cursor))
        taken = np.sort(np.roll(free, -first)[:count])
        if count:
            self._cursor = int(np.roll(free, -first)[count - 1]) + 1
        return [int(index) for index in taken]

    def _write_cells(self, taken: list[int], cells: list[Cell]) -> None:
        """Neighbouring cells go in one call."""
        if not taken:
            return
        self._soiled[taken] = True
        size = self._geometry.cell_size
        for run in _runs(taken):
            raw = b"".join(cells[i].encode().ljust(size, b"\0") for i in run)
            self._disk.write(self._geometry.cell(taken[run[0]]), raw)
        self._disk.sync()

    def _write_root(self, live: NDArray[np.bool_], flags: int) -> None:
        """Goes into the older half; until its sync returns, either root may be the one on the disk."""
        self._sequence += 1
        root = Root(self._sequence, np.packbits(live).tobytes(), flags)
        self._in_doubt = True
        self._disk.write(self._geometry.root(1 - self._half), root.encode(self._geometry.cells))
        self._disk.sync()
        self._in_doubt = False
        self._half = 1 - self._half

    def _adopt(self, live: NDArray[np.bool_], taken: list[int], cells: list[Cell], removed: list[int]) -> None:
        self._live = live
        for number in removed:
            del self._places[number]
        for index, cell in zip(taken, cells, strict=True):
            self._places.setdefault(cell.blob, []).append(index)

    def _wipe_free(self) -> None:
        """Overwrites every free cell that ever held something, then says so in a new root."""
        targets = [int(index) for index in np.flatnonzero(self._soiled & ~self._live)]
        size = self._geometry.cell_size
        for run in _runs(targets):
            self._disk.write(self._geometry.cell(targets[run[0]]), bytes(len(run) * size))
        self._disk.sync()
        self._soiled[targets] = False
        self._wipe_due = False
        self._write_root(self._live, 0)


def _bits(bitmap: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count).astype(bool)


def _place(cell: Cell) -> bytes:
    """What a sealed cell is bound to."""
    return f"{cell.kind}/{cell.blob}/{cell.part}/{cell.parts}".encode()


def _runs(indices: list[int]) -> Iterator[range]:
    """Positions in `indices` that follow each other in the file."""
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield range(start, end)
            start = end
