"""How a store becomes a file of another size, form or key.

Nothing of the file before it stays behind.

Another size is taken on in place where cells and roots keep theirs: the file is never longer than
the larger of both budgets. Everything else is written to a second file beside the first, so that
for as long as this takes both are there; the first is then overwritten before its space is given
back.
"""

import logging
import os
import stat
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from fedkeep.agent.cellfile import Blob, CellFile, FileDisk, StoreError
from fedkeep.agent.cells import LABEL_MAGIC, OVERHEAD, PAGE, Cipher, Geometry, Label
from fedkeep.agent.record import newest_of
from fedkeep.core.errors import ConfigError
from fedkeep.files import put_in_place, sync, temp_path

log = logging.getLogger(__name__)
RESIZED_FROM = "resized_from"
"""In a label.

The file had so many bytes before, and those behind its present end are still to be overwritten.
"""
_AT_ONCE = 4096
"""Blobs that are moved to another file in one commit."""
_CELLS_AT_ONCE = 64
"""Cells that are moved within a file in one commit."""
_ALIGNMENT = 4


def make(
    path: Path,
    blobs: list[Blob],
    label: Label,
    cipher: Cipher | None,
    replaced: FileDisk | None = None,
) -> CellFile:
    """Make a store with these blobs, under its name only once it is whole.

    Parameters
    ----------
    replaced
        What stands under the name now; overwritten once the new file has taken it.
    """
    new = temp_path(path)
    if os.path.lexists(new):
        raise ConfigError(f"{new} is in the way, and not a store of fedkeep: move it away")
    with ExitStack() as undo:
        undo.callback(_discard, new)
        disk = FileDisk(new, label.geometry.size, anew=True)
        undo.callback(disk.close)
        file = CellFile(disk, label.geometry, cipher)
        file.format(label)
        for start in range(0, len(blobs), _AT_ONCE):
            file.commit([(blob.kind, blob.data) for blob in blobs[start : start + _AT_ONCE]], [])
        old = _second_name(path) if replaced is not None else None
        put_in_place(new, path)
        disk.path = path
        undo.pop_all()
    if replaced is not None:
        replaced.wipe()
        if old is not None:
            old.unlink()
    return file


def resize(file: CellFile, blobs: list[Blob], label: Label) -> bool:
    """Give a file the size of `label` in place; False if it must be written anew instead.

    A crash leaves it with the size before or after, and with all that it held.
    """
    old, new = file.geometry, label.geometry
    if (old.cell_size, old.root_size) != (new.cell_size, new.root_size):
        return False
    newest = list(newest_of(blobs).values())
    file.disk.extend(new.size)
    if older := {blob.number for blob in blobs} - {blob.number for blob in newest}:
        file.discard(older)
    moving = [blob for blob in newest if file.last_cell(blob.number) >= new.cells]
    try:
        for part in _parts(moving, file.room):
            file.commit([(b.kind, b.data) for b in part], [b.number for b in part], below=new.cells)
    except StoreError:
        return False
    file.take_label(Label(new, {**label.form, RESIZED_FROM: old.size}))
    finish_resize(file, label, old.size)
    return True


def finish_resize(file: CellFile, label: Label, before: int) -> None:
    """Overwrite and give back what lies behind the end of a file that became shorter."""
    if before > label.geometry.size:
        file.disk.cut(label.geometry.size)
    file.write_label(label)


def rekey(path: Path, label: Label, cipher: Cipher | None, new: Cipher | None) -> int:
    """Write a store anew under another key, or none; returns how many bytes it takes then.

    It keeps as many cells, so that the file becomes longer by what encryption adds to each of them;
    an agent whose budget is smaller brings it to its size when it starts.
    """
    geometry = label.geometry
    with closing(FileDisk(path, geometry.size)) as disk:
        file = CellFile(disk, geometry, cipher)
        blobs = file.load()
        if file.damage:
            raise ConfigError(
                f"{path} is damaged: {file.damage}; first run `fedkeep agent store repair`"
            )
        alignment = label.form.get("sector") or _ALIGNMENT
        size = geometry.cell_size + OVERHEAD[new is not None] - OVERHEAD[cipher is not None]
        size = -(-size // alignment) * alignment
        budget = geometry.size
        while (changed := Geometry.within(budget, size)).cells < geometry.cells:
            budget += PAGE * max(1, (geometry.cells - changed.cells) * size // PAGE)
        form = {**label.form, "key": new.name if new else None}
        wanted = replace(label, geometry=changed, form=form)
        make(path, list(newest_of(blobs).values()), wanted, new, disk).disk.close()
    return changed.size


def clear_away(path: Path) -> None:
    """Overwrite and remove what a process left that was killed while it made or replaced a file."""
    for left in (temp_path(path), _old_path(path)):
        if not os.path.lexists(left) or not stat.S_ISREG(left.lstat().st_mode):
            continue
        if path.exists() and left.samefile(path):
            left.unlink()  # a second name of the store itself
            continue
        with left.open("rb") as file:
            first = file.read(PAGE)
        if first.startswith(LABEL_MAGIC) or not first.strip(b"\0"):
            _discard(left)


def _discard(path: Path) -> None:
    """Overwrite a file and removes it."""
    if not os.path.lexists(path):
        return
    with suppress(OSError), closing(FileDisk(path, 0)) as disk:
        disk.wipe()
    path.unlink(missing_ok=True)


def _old_path(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _second_name(path: Path) -> Path | None:
    """Give a name under which a replaced file is found again after a crash.

    None where a file can have only one.
    """
    old = _old_path(path)
    try:
        os.link(path, old)
    except OSError:
        return None
    sync(path.parent)
    return old


def _parts(blobs: list[Blob], room: int) -> list[list[Blob]]:
    """Return blobs in groups of few cells each."""
    parts: list[list[Blob]] = []
    cells = _CELLS_AT_ONCE
    for blob in blobs:
        own = -(-max(1, len(blob.data)) // room)
        if cells + own > _CELLS_AT_ONCE:
            parts.append([])
            cells = 0
        parts[-1].append(blob)
        cells += own
    return parts
