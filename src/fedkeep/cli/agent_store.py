"""`fedkeep agent store`: inspect, repair and export a store's file without an agent."""

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from fedkeep.agent.cellfile import CellFile, FileDisk
from fedkeep.agent.cells import Cipher, Label, cipher_of
from fedkeep.agent.durable_store import rank_columns, restore_codec
from fedkeep.agent.record import (
    META_BYTES,
    SAMPLE,
    SampleMetadata,
    decode_arrays,
    decode_note,
    newest_of,
)
from fedkeep.agent.store_file import find_label, superfluous
from fedkeep.core.errors import ConfigError, optional_import
from fedkeep.core.types import AnyArray
from fedkeep.encoding import EncodingName, SampleCodec

_TRIED = 1000
"""About how many samples are deflated to see what it would give."""
_PAYS = 0.9

store = typer.Typer(
    help="Look into a store's file, repair it, take samples out.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The store, as in [store] path.")]
KeyFile = Annotated[
    Path | None, typer.Option(help="The file with the key under which it is encrypted.")
]
KeyEnv = Annotated[str | None, typer.Option(help="The environment variable with that key.")]
Limit = Annotated[int, typer.Option(min=0, help="Samples to list, newest first.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="A .npz or .parquet file, or a folder.")]


@dataclass(frozen=True)
class Inspected:
    """What was found in a store's file."""

    label: Label
    wrong: list[str]
    notes: list[SampleMetadata]
    """Oldest arrival first."""
    x: AnyArray
    """Their samples, (n, ...), float32."""
    bytes_used: int
    deflated: list[int]
    """The bytes that some of the samples would take deflated, without loss, ascending; none where
    it does not pay."""


def inspect(path: Path, cipher: Cipher | None = None, *, mend: bool = False) -> Inspected:
    """Read a file without changing a byte of it.

    Or else, to `mend` it, write roots and labels anew over what is whole, as an agent does when it
    starts.
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
        state = decode_arrays(newest)
        sources = restore_codec(codec, state, newest)
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
    wrong = [str(file.damage)] if file.damage else []
    if file.damage.root_copies:
        wrong.append(f"{file.damage.root_copies} copies of a root are damaged")
    if not whole:
        wrong.append("one label is damaged")
    ranks, places = rank_columns(state, notes), {note.id: i for i, note in enumerate(notes)}
    order = [places[id_] for id_ in ranks["ids"].tolist()]
    now = zip(order, ranks["scores"].tolist(), ranks["uses"].tolist(), strict=True)
    ranked = [notes[i]._replace(score=score, uses=uses) for i, score, uses in now]
    return Inspected(label, wrong, ranked, x[order], used, deflated)


@store.command()
def check(file: File, key_file: KeyFile = None, key_env: KeyEnv = None) -> None:
    """Say what is in a store and whether it is sound; exit code 1 if it is not."""
    found = inspect(file, cipher_of(key_file, key_env))
    typer.echo(_summary(file, found))
    if found.deflated:
        sizes = found.deflated
        median, most = sizes[len(sizes) // 2], sizes[len(sizes) * 19 // 20]
        typer.echo(
            f"deflated, half of the samples take {median} bytes and 19 of 20 {most}: "
            "see [store] deflate_to"
        )
    if found.wrong:
        raise typer.Exit(1)


@store.command()
def repair(file: File, key_file: KeyFile = None, key_env: KeyEnv = None) -> None:
    """Write roots and labels anew over all that is whole; no agent may be running on it."""
    cipher = cipher_of(key_file, key_env)
    typer.echo(_summary(file, inspect(file, cipher, mend=True)))
    typer.echo(f"mended: {len(inspect(file, cipher).notes)} samples go on")


@store.command()
def show(file: File, key_file: KeyFile = None, key_env: KeyEnv = None, limit: Limit = 20) -> None:
    """Show what is stored: samples per label, and the newest of them."""
    found = inspect(file, cipher_of(key_file, key_env))
    console = Console()
    counts = Counter(note.label for note in found.notes)
    console.print(
        ", ".join(f"label {label}: {count}" for label, count in sorted(counts.items())) or "empty"
    )
    table = Table("id", "label", "value", "uses", "stored at", "source")
    for note in reversed(found.notes[-limit:] if limit else []):
        table.add_row(
            str(note.id),
            str(note.label),
            f"{note.score:.4g}",
            str(note.uses),
            when(note.wall),
            note.source,
        )
    console.print(table)


@store.command()
def export(file: File, out: Out, key_file: KeyFile = None, key_env: KeyEnv = None) -> None:
    """Write all samples with labels and ids to a file, or as files in a folder per label."""
    found = inspect(file, cipher_of(key_file, key_env))
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
        with optional_import("writing Parquet", "parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        x = pa.FixedSizeListArray.from_arrays(
            pa.array(found.x.ravel()), int(np.prod(found.x.shape[1:]))
        )
        table = pa.table(
            {"x": x, **{name: pa.array(column.tolist()) for name, column in columns.items()}}
        )
        pq.write_table(table.replace_schema_metadata({"shape": str(list(found.x.shape[1:]))}), out)
    else:
        out.mkdir()
        for note, sample in zip(found.notes, found.x, strict=True):
            folder = out / str(note.label)
            folder.mkdir(exist_ok=True)
            np.save(folder / f"{note.id}.npy", sample)
    typer.echo(f"{len(found.notes)} samples of shape {list(found.x.shape[1:])} written to {out}")


def when(time: float) -> str:
    """Write a time of the device's clock for people."""
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _summary(file: Path, found: Inspected) -> str:
    geometry, form = found.label.geometry, found.label.form
    labels = len({note.label for note in found.notes})
    what = (
        f"{len(found.notes)} samples of {np.dtype(form['dtype'])} {form['shape']}, {labels} labels"
    )
    size = f"{found.bytes_used} of {geometry.size} bytes, {geometry.cell_size} per sample"
    return f"{file}: {what}; {size}; {'; '.join(found.wrong) or 'sound'}"
