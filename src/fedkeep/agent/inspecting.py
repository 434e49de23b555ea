"""Looking into a store's file without an agent: what is in it, what is wrong with it, and its samples taken out."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from fedkeep.agent.cellfile import CellFile, Contents
from fedkeep.agent.cells import Label
from fedkeep.agent.cipher import Cipher, check_key
from fedkeep.agent.disk import Disk, FileDisk
from fedkeep.agent.durable_store import decode_samples
from fedkeep.agent.opening import find_label, superfluous
from fedkeep.agent.record import META_BYTES, SAMPLE, Note, SampleForm
from fedkeep.core.encoding import EncodingName
from fedkeep.core.errors import ConfigError, needing
from fedkeep.core.types import AnyArray

_TRIED = 1000
"""About how many samples are deflated to see what it would give."""
_PAYS = 0.9


@dataclass(frozen=True)
class Inspected:
    """What a file holds."""

    label: Label
    labels_whole: bool
    contents: Contents
    notes: list[Note]
    """Oldest arrival first."""
    x: AnyArray
    """Their samples, (n, ...), float32."""
    bytes_used: int
    deflated: list[int]
    """The bytes that some of the samples would take deflated, without loss, ascending; none where it does not pay."""

    @property
    def dtype(self) -> str:
        return str(np.dtype(self.label.form["dtype"]))

    @property
    def counts(self) -> Counter[int]:
        return Counter(note.label for note in self.notes)

    @property
    def sound(self) -> bool:
        return self.labels_whole and not self.contents.damage and not self.contents.damage.root_copies


def inspect(path: Path, cipher: Cipher | None = None) -> Inspected:
    """Reads a file without changing a byte of it."""
    label, whole = _label(path, cipher)
    disk = FileDisk(path)
    try:
        return _read(disk, label, whole, cipher)
    finally:
        disk.close()


def repair(path: Path, cipher: Cipher | None = None) -> Inspected:
    """Writes roots and labels anew over what is whole, as an agent does when it starts; returns what was found."""
    label, whole = _label(path, cipher)
    disk = FileDisk(path, label.geometry.size)
    try:
        found = _read(disk, label, whole, cipher)
        file = CellFile(disk, label.geometry, cipher)
        contents = file.load()
        if contents.damage:
            file.discard(superfluous(contents.blobs, int(label.form.get("capacity", len(contents.blobs)))))
        file.discard([])
        file.write_label(label)
        return found
    finally:
        disk.close()


def _label(path: Path, cipher: Cipher | None) -> tuple[Label, bool]:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file" if path.exists() else f"there is no file {path}")
    label, whole = find_label(path, None)
    check_key(label.form["key"], cipher, path)
    return label, whole


def _read(disk: Disk, label: Label, whole: bool, cipher: Cipher | None) -> Inspected:
    file = CellFile(disk, label.geometry, cipher)
    contents = file.load()
    gone = superfluous(contents.blobs, int(label.form.get("capacity", len(contents.blobs))))
    blobs = [blob for blob in contents.blobs if blob.number not in gone]
    codec = _form(label).codec()
    notes, x = decode_samples(blobs, codec)
    rows = [blob.data[META_BYTES:] for blob in blobs if blob.kind == SAMPLE]
    deflated = sorted(codec.deflated_sizes(rows[:: max(1, len(rows) // _TRIED)]))
    pays = bool(deflated) and deflated[len(deflated) // 2] < _PAYS * codec.plain_bytes
    order = sorted(range(len(notes)), key=lambda i: notes[i].arrival)
    return Inspected(
        label, whole, contents, [notes[i] for i in order], x[order], file.bytes_used, deflated if pays else []
    )


def _form(label: Label) -> SampleForm:
    name, shape = label.form["dtype"], tuple(label.form["shape"])
    encoding = name if name in get_args(EncodingName) else None
    return SampleForm(np.dtype("<f4" if encoding else name), shape, encoding, label.form["deflate_to"])


def export(found: Inspected, out: Path) -> None:
    """Writes samples with labels, ids and scores: `.npz`, `.parquet`, or else a folder with one folder per label."""
    if out.exists():
        raise ConfigError(f"{out} exists: choose another name")
    columns = {
        "y": np.array([note.label for note in found.notes], dtype=np.int64),
        "ids": np.array([note.id for note in found.notes], dtype=np.int64),
        "scores": np.array([note.score for note in found.notes]),
        "times": np.array([note.wall for note in found.notes]),
        "sources": np.array([note.source for note in found.notes], dtype=np.str_),
    }
    if out.suffix == ".npz":
        np.savez_compressed(out, allow_pickle=False, x=found.x, **columns)
    elif out.suffix == ".parquet":
        _export_parquet(found, columns, out)
    else:
        _export_folder(found, out)


def _export_parquet(found: Inspected, columns: dict[str, AnyArray], out: Path) -> None:
    with needing("writing Parquet", "parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    x = pa.FixedSizeListArray.from_arrays(pa.array(found.x.ravel()), int(np.prod(found.x.shape[1:])))
    table = pa.table({"x": x, **{name: pa.array(column.tolist()) for name, column in columns.items()}})
    pq.write_table(table.replace_schema_metadata({"shape": str(list(found.x.shape[1:]))}), out)


def _export_folder(found: Inspected, out: Path) -> None:
    out.mkdir()
    for note, x in zip(found.notes, found.x, strict=True):
        folder = out / str(note.label)
        folder.mkdir(exist_ok=True)
        np.save(folder / f"{note.id}.npy", x)
