"""`fedkeep agent store`.

Looks into a store's file, repairs it and takes samples out, without an agent.
"""

import os
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, get_args
from urllib.parse import quote

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
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
    split_name,
    split_target,
)
from fedkeep.agent.sample_ids import SampleIds
from fedkeep.agent.store_file import find_label, superfluous
from fedkeep.agent.store_moves import clear_away
from fedkeep.agent.store_moves import rekey as store_rekey
from fedkeep.core.errors import ConfigError, optional_import
from fedkeep.core.state import strip_prefix
from fedkeep.core.types import AnyArray
from fedkeep.encoding import EncodingName, SampleCodec
from fedkeep.files import atomic_write, temp_path
from fedkeep.protocol.printing import printable

_TRIED = 1000
"""About how many samples are deflated to see what it would give."""
_PAYS = 0.9
_PRIVATE, _PRIVATE_FOLDER = 0o600, 0o700
"""What is exported is no more readable than the store."""

store = typer.Typer(
    help="Look into a store's file, repair it, take samples out, change its key.",
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
    """What a store's file holds."""

    label: Label
    wrong: list[str]
    notes: list[SampleMetadata]
    """Oldest arrival first."""
    x: AnyArray
    """Their samples, (n, ...), float32."""
    ids: SampleIds
    """How ids are numbered there."""
    bytes_used: int
    deflated: list[int]
    """The bytes that some of the samples would take deflated, without loss, ascending.

    None where it does not pay.
    """


def inspect(path: Path, cipher: Cipher | None = None, *, mend: bool = False) -> Inspected:
    """Read a file without changing a byte of it.

    Or else, to `mend` it, writes roots and labels anew over what is whole, as an agent does when it
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
        most = label.form.get("name_bytes", 0)
        width = label.form.get("targets", 0)
        contents = [split_target(blob.data[META_BYTES:], width)[1] for blob in samples]
        named = [split_name(content, most) for content in contents]
        rows = [row for row, _ in named]
        notes = [
            decode_note(blob, sources, width)._replace(name=name)
            for blob, (_, name) in zip(samples, named, strict=True)
        ]
        x = codec.decode(rows)
        if mend:
            if file.damage:
                file.discard(gone)
            file.commit([], [], wipe=True)
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
    ids, known = SampleIds({}), strip_prefix("ids", state)
    if known:
        ids.restore(known)
    ids.earlier |= not known  # no agent that has namespaces has opened it
    return Inspected(label, wrong, ranked, x[order], ids, used, deflated)


@store.command()
def check(file: File, key_file: KeyFile = None, key_env: KeyEnv = None) -> None:
    """Say what is in a store and whether it is sound; exit code 1 if it is not."""
    found = inspect(file, cipher_of(key_file, key_env))
    typer.echo(_summary(file, found))
    if found.deflated:
        sizes = found.deflated
        median, most = sizes[len(sizes) // 2], sizes[len(sizes) * 19 // 20]
        typer.echo(
            f"deflated, half of the samples take {median} bytes and 19 of 20 {most}: see "
            "[store] deflate_to"
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
    named = "interval" if any(note.target for note in found.notes) else "label"
    console.print(
        ", ".join(f"{named} {label}: {count}" for label, count in sorted(counts.items())) or "empty"
    )
    target = "number" if named == "interval" else "label"
    table = Table("id", target, "value", "uses", "stored at", "source")
    for note in reversed(found.notes[-limit:] if limit else []):
        table.add_row(
            _plain(note.name or str(note.id)),
            ", ".join(f"{number:.6g}" for number in note.target) or str(note.label),
            f"{note.score:.4g}",
            str(note.uses),
            when(note.wall),
            _plain(note.source),
        )
    console.print(table)


@store.command()
def export(
    file: File,
    out: Out,
    key_file: KeyFile = None,
    key_env: KeyEnv = None,
    id_: Annotated[
        list[str] | None, typer.Option("--id", help="Only samples of this id; may be repeated.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only ids of this namespace, with --id.")
    ] = None,
    label: Annotated[
        list[int] | None, typer.Option(help="Only samples of this label; may be repeated.")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="Only samples from this source; may be repeated.")
    ] = None,
    since: Annotated[
        datetime | None, typer.Option(help="Only those stored then or later, by its clock.")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(help="Only those stored then or before.")
    ] = None,
) -> None:
    """Write samples with labels, ids and values to a file, or one file each into folders by label.

    Options of one kind add up, those of different kinds must all hold. What is written is readable
    by its owner only.
    """
    found = inspect(file, cipher_of(key_file, key_env))
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists: choose another name")
    first, last = (None if time is None else time.timestamp() for time in (since, until))
    named = _numbers(found, id_ or [], namespace)
    if namespace is not None and not id_:
        raise ConfigError("--namespace says which --id is meant: give that, too, or --source")
    chosen = [
        i
        for i, note in enumerate(found.notes)
        if (not id_ or note.id in named or (namespace is None and note.name in id_))
        and (not label or note.label in label)
        and (not source or note.source in source)
        and (first is None or note.wall >= first)
        and (last is None or note.wall <= last)
    ]
    _write(out, [found.notes[i] for i in chosen], found.x[chosen])
    typer.echo(f"{len(chosen)} samples of shape {list(found.x.shape[1:])} written to {out}")


@store.command()
def rekey(
    file: File,
    key_file: KeyFile = None,
    key_env: KeyEnv = None,
    new_key_file: Annotated[
        Path | None, typer.Option(help="The file with the key under which it is encrypted anew.")
    ] = None,
    new_key_env: Annotated[
        str | None, typer.Option(help="The environment variable with that key.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Encrypt it no more.")] = False,
) -> None:
    """Encrypt a store, give it another key, or encrypt it no more; no agent may be running on it.

    The file before is overwritten once the new one is whole; until then both are there.
    """
    new = cipher_of(new_key_file, new_key_env)
    if (new is None) != plain:
        raise ConfigError("say what it is to be: --new-key-file, --new-key-env or --plain")
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    cipher, path = cipher_of(key_file, key_env), Path(os.path.realpath(file))
    clear_away(path)
    label, _ = find_label(path, cipher)
    size = store_rekey(path, label, cipher, new)
    known = f"encrypted under the key {new.name}" if new else "not encrypted"
    typer.echo(f"{file} is now {known} and has {size} bytes; set key_file or key_env to match")


def _numbers(found: Inspected, ids: list[str], namespace: str | None) -> set[int]:
    """Return the numbers by which samples of these ids are known."""
    sources = {note.source for note in found.notes if note.source}
    return {number for id_ in ids for number in found.ids.matches(id_, sources, namespace)}


def _plain(text: str) -> str:
    """Text from outside for a cell of a table: no markup, nothing that a terminal obeys."""
    return escape(printable(text))


def _write(out: Path, notes: list[SampleMetadata], x: AnyArray) -> None:
    """Write samples in the form that the name of `out` asks for, all of them or none."""
    columns = {
        "y": _targets(notes),
        "ids": np.array([note.id for note in notes], dtype=np.int64),
        "names": np.array([note.name or str(note.id) for note in notes], dtype=np.str_),
        "scores": np.array([note.score for note in notes]),
        "times": np.array([note.wall for note in notes]),
        "sources": np.array([note.source for note in notes], dtype=np.str_),
    }
    if out.suffix == ".npz":
        with atomic_write(out, _PRIVATE) as file:
            np.savez_compressed(file, allow_pickle=False, x=x, **columns)
    elif out.suffix == ".parquet":
        with optional_import("writing Parquet", "parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), int(np.prod(x.shape[1:])))
        lists = {name: pa.array(column.tolist()) for name, column in columns.items()}
        table = pa.table({"x": rows, **lists})
        with atomic_write(out, _PRIVATE) as file:
            pq.write_table(table.replace_schema_metadata({"shape": str(list(x.shape[1:]))}), file)
    else:
        _write_folder(out, notes, x)


def _targets(notes: list[SampleMetadata]) -> AnyArray:
    """Return labels, or the numbers to predict, (n,) or (n, width)."""
    if any(note.target for note in notes):
        rows = np.array([note.target for note in notes])
        return rows[:, 0] if rows.shape[1] == 1 else rows
    return np.array([note.label for note in notes], dtype=np.int64)


def _write_folder(out: Path, notes: list[SampleMetadata], x: AnyArray) -> None:
    """Write a folder for each label, with a file for each sample, called as the sample is."""
    if any(note.target for note in notes):
        raise ConfigError(
            "these samples have numbers to predict, and folders have no place for them: name a "
            "file that ends in .npz or .parquet"
        )
    new = temp_path(out)
    new.mkdir(_PRIVATE_FOLDER)
    try:
        for note, sample in zip(notes, x, strict=True):
            folder = new / str(note.label)
            folder.mkdir(_PRIVATE_FOLDER, exist_ok=True)
            name = quote(note.name or str(note.id), safe=" ")
            place = folder / f"{name}.npy"
            with os.fdopen(
                os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "wb"
            ) as f:
                np.save(f, sample, allow_pickle=False)
        new.rename(out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


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
