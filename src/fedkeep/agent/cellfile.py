"""Transactions over the store's file: cells are never overwritten while a root that counts them could be needed.

A commit writes new blobs into free cells, syncs, writes the other root, and syncs again. Killed at any point, the
file is what it was before or what it is after. The file has its full size from the start, so that no commit can
push it over its budget.

A commit that only puts single cells in the place of others needs no root: each new cell says that it counts, and which
one no longer does. That is one sync, and not a byte beside the cells. Such cells stay untouched until the next root.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedkeep.agent.cells import FAR, SEQUENCE_SHIFT, WIPE, FileCell, Geometry, Label, Root, decode_cell, decode_root
from fedkeep.agent.cipher import OVERHEAD, Cipher
from fedkeep.agent.disk import Disk, StoreError

_STRIDE = 1 << 18
"""Cells are read about this many bytes at a time, so that opening a store needs little memory."""


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
    """The newest root was lost in both places: the one before it counts, and all whole cells that are newer."""
    root_copies: int = 0
    """Roots that were lost in one place only, which costs nothing."""
    label: bool = False

    def __bool__(self) -> bool:
        return bool(self.cells or self.blobs or self.salvaged or self.label)

    @property
    def salvaged(self) -> bool:
        """Whether there may be more than ever counted at one time."""
        return self.roots or self.rolled_back

    def __str__(self) -> str:
        said = [f"{self.cells} cells cannot be read" if self.cells else "", "the label is lost" if self.label else ""]
        if self.roots:
            said.append("no root is whole: what single cells hold is taken, replaced samples included")
        elif self.rolled_back:
            said.append("the newest root is lost: rolled back to the one before it, with all that newer cells hold")
        return "; ".join(filter(None, said)) or f"{self.blobs} blobs are incomplete"


@dataclass
class Contents:
    blobs: list[Blob]
    damage: Damage = field(default_factory=Damage)


class CellFile:
    """Blobs in a fixed file, changed by atomic transactions."""

    def __init__(self, disk: Disk, geometry: Geometry, cipher: Cipher | None = None) -> None:
        self._disk = disk
        self.geometry = geometry
        self._cipher = cipher
        self.capacity = geometry.payload - (OVERHEAD if cipher else 0)
        """Bytes of a blob per cell."""
        self._live: NDArray[np.bool_] = np.zeros(geometry.cells, dtype=bool)
        self._soiled: NDArray[np.bool_] = np.zeros(geometry.cells, dtype=bool)
        self._young: NDArray[np.bool_] = np.zeros(geometry.cells, dtype=bool)
        """Cells written since the last root: not to be written to before the next."""
        self._places: dict[int, list[int]] = {}
        self._sequence = 0
        self._half = 0
        self._cursor = 0
        self._in_doubt = False
        self._wipe_due = False

    @property
    def free(self) -> int:
        return int(self.geometry.cells - self._live.sum())

    @property
    def bytes_used(self) -> int:
        """Bytes of the cells that count, with everything around them."""
        return self.geometry.size - self.free * self.geometry.cell_size

    def cells_for(self, length: int) -> int:
        """How many cells a blob of `length` bytes takes."""
        return max(1, -(-length // self.capacity))

    def write_label(self, label: Label) -> None:
        """Puts the label at both ends of the file."""
        page = label.encode()
        self._disk.write(0, page)
        self._disk.write(self.geometry.label_copy, page)
        self._disk.sync()

    def format(self, label: Label) -> None:
        """Makes an empty store, with both its roots: a root that is missing later was lost."""
        self._write_root(self._live)
        self._write_root(self._live)
        self.write_label(label)

    # -- reading ---------------------------------------------------------------------------------------------------

    def load(self) -> Contents:
        """All blobs that count and are whole; also makes the file ready for the next commit.

        It syncs first: what an earlier process left in the page cache must be on the disk before anything builds on it.
        """
        self._disk.sync()
        roots, damage = self._read_roots()
        root = max(roots.values(), key=lambda r: r.sequence, default=None)
        counted = np.ones(self.geometry.cells, dtype=bool)
        if root is not None:
            self._half = next(half for half, found in roots.items() if found is root)
            self._wipe_due = bool(root.flags & WIPE)
            counted = _bits(root.bitmap, self.geometry.cells)
        cells = dict(self._scan())
        since = -1 if root is None else root.sequence
        self._sequence = max([since, *(cell.sequence for cell in cells.values())])
        if root is not None:
            self._count_newer(cells, counted, since, everything=damage.rolled_back)
            damage.cells = int(counted.sum()) - sum(bool(counted[index]) for index in cells)
        return self._assemble({index: cell for index, cell in cells.items() if counted[index]}, damage)

    def _count_newer(
        self, cells: dict[int, FileCell], counted: NDArray[np.bool_], since: int, *, everything: bool
    ) -> None:
        """Counts the cells written after the root of transaction `since`, in the order in which they were."""
        newer = sorted(
            (c.sequence, index) for index, c in cells.items() if c.sequence > since and (c.light or everything)
        )
        self._young[:] = False
        for _, index in newer:
            counted[index] = self._young[index] = True
            freed = cells[index].frees
            if freed is not None and freed < len(counted):
                counted[freed] = False

    def reload(self) -> Contents:
        """All blobs as of the last commit that succeeded; for use after one that failed."""
        live = self._live.copy()
        cells = {index: cell for index, cell in self._scan() if live[index]}
        return self._assemble(cells, Damage(cells=int(live.sum()) - len(cells)))

    def _read_roots(self) -> tuple[dict[int, Root], Damage]:
        """The roots that are whole in at least one place, by half.

        A root is torn by a crash in its first place only: the copy is written once the first is on the disk.
        """
        found, damage = {}, Damage()
        for half in (0, 1):
            copies = [self._read_root(half, copy) for copy in (0, 1)]
            whole = [root for root in copies if root is not None]
            if whole:
                found[half] = max(whole, key=lambda root: root.sequence)
                damage.root_copies += len(copies) - len(whole)
        damage.roots = not found
        damage.rolled_back = len(found) == 1
        return found, damage

    def _read_root(self, half: int, copy: int) -> Root | None:
        area = self._disk.read(self.geometry.root(half, copy), self.geometry.root_size)
        return decode_root(area, self.geometry.cells)

    def _scan(self) -> Iterator[tuple[int, FileCell]]:
        """The cells that are whole, whether they count or not."""
        size = self.geometry.cell_size
        step = max(1, _STRIDE // size)
        for start in range(0, self.geometry.cells, step):
            count = min(step, self.geometry.cells - start)
            chunk = self._disk.read(self.geometry.cell(start), count * size)
            soiled = np.frombuffer(chunk, np.uint8).reshape(count, size).any(axis=1)
            self._soiled[start : start + count] = soiled
            for index in np.flatnonzero(soiled):
                cell = decode_cell(chunk[index * size : (index + 1) * size])
                if cell is not None:
                    yield start + int(index), cell

    def _assemble(self, cells: dict[int, FileCell], damage: Damage) -> Contents:
        parts: dict[int, dict[int, tuple[int, FileCell]]] = {}
        for index, cell in cells.items():
            parts.setdefault(cell.blob, {})[cell.part] = (index, cell)
        self._live[:] = False
        self._places.clear()
        blobs = []
        for number, found in sorted(parts.items()):
            blob = self._join(number, [cell for _, (_, cell) in sorted(found.items())])
            if blob is None:
                damage.blobs += 1
                continue
            blobs.append(blob)
            self._places[number] = [index for index, _ in found.values()]
        self._live[[index for place in self._places.values() for index in place]] = True
        return Contents(blobs, damage)

    def _join(self, number: int, cells: list[FileCell]) -> Blob | None:
        """The blob of these parts, or None if one is missing or was tampered with."""
        opened = [self._cipher.unseal(cell.data, _place(cell)) if self._cipher else cell.data for cell in cells]
        pieces = [piece for piece in opened if piece is not None]
        return Blob(number, cells[0].kind, b"".join(pieces)) if len(pieces) == cells[0].parts else None

    # -- writing ---------------------------------------------------------------------------------------------------

    def commit(
        self, add: Sequence[tuple[int, bytes]], remove: Iterable[int], *, wipe: bool = False, atomic: bool = True
    ) -> list[int]:
        """Adds blobs (kind, data) and removes others, all or nothing; returns the new blobs' numbers.

        With `wipe`, what is removed, now or earlier, is also overwritten before the call returns. Where it need not be
        `atomic`, a crash in the middle may leave some of the new blobs, each in the place of the removed one that
        stands where it does in the list. On an OSError the transaction did not happen as far as the caller knows, and
        the next commit may succeed.
        """
        self._settle(sum(self.cells_for(len(data)) for _, data in add))
        removed = [number for number in remove if number in self._places]
        freed = [index for number in removed for index in self._places[number]]
        cells = self._lay_out(add)
        taken = self._places_for(cells)
        live = self._live.copy()
        live[taken] = True
        live[freed] = False
        if not (atomic or wipe or self._wipe_due) and _may_be_light(cells, freed):
            self._write_light(taken, cells, freed)
        else:
            self._write_cells(taken, cells)
            self._wipe_due = self._wipe_due or wipe
            self._write_root(live)
        self._adopt(live, taken, cells, removed)
        if self._wipe_due:
            self._wipe_free()
        return sorted({cell.blob for cell in cells})

    def discard(self, numbers: Iterable[int]) -> None:
        """Lets go of blobs that were salvaged but never counted together, without needing room; writes a root."""
        for number in numbers:
            self._live[self._places.pop(number)] = False
        self._write_root(self._live)

    def _settle(self, wanted: int) -> None:
        """Writes a root where one is due before anything else.

        After a commit whose fate is unknown it makes what was before the newest again, before any cell is reused; and
        where too few cells are left it gives back those that light commits have freed of each other's.
        """
        if self._in_doubt or len(self._allocatable()) < wanted:
            self._write_root(self._live)

    def _write_light(self, taken: list[int], cells: list[FileCell], freed: list[int]) -> None:
        self._in_doubt = True
        self._write_cells(taken, [c._replace(light=True, frees=i) for c, i in zip_longest(cells, freed)])
        self._in_doubt = False
        self._young[taken] = True

    def _lay_out(self, add: Sequence[tuple[int, bytes]]) -> list[FileCell]:
        self._sequence += 1
        cells = []
        for offset, (kind, data) in enumerate(add):
            number = (self._sequence << SEQUENCE_SHIFT) + offset
            pieces = [data[i : i + self.capacity] for i in range(0, len(data), self.capacity)] or [b""]
            for part, piece in enumerate(pieces):
                cells.append(self._seal(FileCell(kind, number, part, len(pieces), piece)))
        return sorted(cells, key=lambda cell: cell.kind == FAR)

    def _seal(self, cell: FileCell) -> FileCell:
        if self._cipher is None:
            return cell
        return cell._replace(data=self._cipher.seal(cell.data, _place(cell)))

    def _allocatable(self) -> NDArray[np.int64]:
        return np.flatnonzero(~self._live & ~self._young)

    def _places_for(self, cells: list[FileCell]) -> list[int]:
        """Free cells, going round the file so that it wears evenly."""
        free = self._allocatable()
        if len(free) < len(cells):
            raise StoreError(
                f"the store's budget has no room for {len(cells)} more cells: raise it or lower the capacity"
            )
        free = np.roll(free, -int(np.searchsorted(free, self._cursor)))
        near = sum(cell.kind != FAR for cell in cells)
        if near:
            self._cursor = int(free[near - 1]) + 1
        rest = free[near:]
        far = np.roll(rest, len(rest) // 2)[: len(cells) - near]
        return [*np.sort(free[:near]).tolist(), *np.sort(far).tolist()]

    def _write_cells(self, taken: list[int], cells: list[FileCell]) -> None:
        """Neighbouring cells go in one call."""
        if not taken:
            return
        self._soiled[taken] = True
        size = self.geometry.cell_size
        for run in _runs(taken):
            raw = b"".join(cells[i].encode().ljust(size, b"\0") for i in run)
            self._disk.write(self.geometry.cell(taken[run[0]]), raw)
        self._disk.sync()

    def _write_root(self, live: NDArray[np.bool_]) -> None:
        """Goes into the older half; until its sync returns, either root may be the one on the disk."""
        self._sequence += 1
        flags = WIPE if self._wipe_due else 0
        root = Root(self._sequence, np.packbits(live).tobytes(), flags).encode(self.geometry.cells)
        self._in_doubt = True
        self._disk.write(self.geometry.root(1 - self._half), root)
        self._disk.sync()
        self._disk.write(self.geometry.root(1 - self._half, 1), root)
        self._in_doubt = False
        self._half = 1 - self._half
        self._young[:] = False

    def _adopt(self, live: NDArray[np.bool_], taken: list[int], cells: list[FileCell], removed: list[int]) -> None:
        self._live = live
        for number in removed:
            del self._places[number]
        for index, cell in zip(taken, cells, strict=True):
            self._places.setdefault(cell.blob, []).append(index)

    def _wipe_free(self) -> None:
        """Overwrites every free cell that ever held something, then says so in a new root."""
        targets = [int(index) for index in np.flatnonzero(self._soiled & ~self._live)]
        size = self.geometry.cell_size
        for run in _runs(targets):
            self._disk.write(self.geometry.cell(targets[run[0]]), bytes(len(run) * size))
        self._disk.sync()
        self._soiled[targets] = False
        self._wipe_due = False
        self._write_root(self._live)


def _bits(bitmap: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count).astype(bool)


def _may_be_light(cells: list[FileCell], freed: list[int]) -> bool:
    """Whether each new cell is a blob of its own and can say for itself which one it takes the place of."""
    return len(freed) <= len(cells) and all(cell.parts == 1 for cell in cells)


def _place(cell: FileCell) -> bytes:
    """What a sealed cell is bound to."""
    return f"{cell.kind}/{cell.blob}/{cell.part}/{cell.parts}".encode()


def _runs(indices: list[int]) -> Iterator[range]:
    """Positions in `indices` that follow each other in the file."""
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield range(start, end)
            start = end
