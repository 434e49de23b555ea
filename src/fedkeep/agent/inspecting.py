"""Looking into a store's file without an agent: what is in it, what is wrong with it, and its samples taken out."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from fedkeep.agent.cellfile import CellFile, Damage
from fedkeep.agent.cells import Label
from fedkeep.agent.cipher import Cipher
from fedkeep.agent.disk import FileDisk
from fedkeep.agent.durable_store import restore_codec
from fedkeep.agent.opening import find_label, superfluous
from fedkeep.agent.record import META_BYTES, SAMPLE, Note, decode_arrays, decode_note, newest_of
from fedkeep.core.encoding import EncodingName, SampleCodec
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
    damage: Damage
    notes: list[Note]
    """Oldest arrival first."""
    x: AnyArray
    """Their samples, (n, ...), float32."""
    bytes_used: int
    deflated: list[int]
    """The bytes that some of the samples would take deflated, without loss, ascending; none where it does not pay."""


def inspect(path: Path, cipher: Cipher | None = None, *, mend: bool = False) -> Inspected:
    """Reads a file without changing a byte of it.

    Or else, to `mend` it, writes roots and labels anew over what is whole, as an agent does when it starts.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file" if path.exists() else f"there is no file {path}")
    label, whole = find_label(path, cipher)
    with closing(FileDisk(path, label.geometry.size if mend else None)) as disk:
        file = CellFile(disk, label.geometry, cipher)
        found = file.load()
        used = file.bytes_used
        gone = superfluous(found, label.form.get("capacity", len(found)))
        blobs = [blob for blob in found if blob.number not in gone]
        name, shape, deflate_to = (label.form[key] for key in ("dtype", "shape", "deflate_to"))
        encoding = name if name in get_args(EncodingName) else None
        codec = SampleCodec(tuple(shape), "<f4" if encoding else name, encoding, deflate_to)
        newest = newest_of(blobs)
        sources = restore_codec(codec, decode_arrays(newest), newest)
        samples = [blob for blob in blobs if blob.kind == SAMPLE]
        rows = [blob.data[META_BYTES:] for blob in samples]
        notes = [decode_note(blob, sources) for blob in samples]
        x = codec.decode(rows)
        if mend:
            if file.damage:
                file.discard(gone)
            file.discard([])
            file.write_label(label)
    deflated = sorted(codec.deflated_sizes(rows[:: max(1, len(rows) // _TRIED)]))
    if deflated and deflated[len(deflated) // 2] >= _PAYS * codec.plain_bytes:
        deflated = []
    order = sorted(range(len(notes)), key=lambda i: notes[i].arrival)
    return Inspected(label, whole, file.damage, [notes[i] for i in order], x[order], used, deflated)


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
        with needing("writing Parquet", "parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        x = pa.FixedSizeListArray.from_arrays(pa.array(found.x.ravel()), int(np.prod(found.x.shape[1:])))
        table = pa.table({"x": x, **{name: pa.array(column.tolist()) for name, column in columns.items()}})
        pq.write_table(table.replace_schema_metadata({"shape": str(list(found.x.shape[1:]))}), out)
    else:
        out.mkdir()
        for note, sample in zip(found.notes, found.x, strict=True):
            folder = out / str(note.label)
            folder.mkdir(exist_ok=True)
            np.save(folder / f"{note.id}.npy", sample)
