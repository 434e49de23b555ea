"""`fedkeep agent store`.

Looks into a store's file, repairs it and takes samples out, without an agent.
"""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Annotated, get_args
from urllib.parse import quote

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedkeep.agent.cellfile import CellFile, FileDisk
from fedkeep.agent.cells import Cipher, Label, cipher_of
from fedkeep.agent.durable_store import rank_columns, restore_codec
from fedkeep.agent.payloads import suffix_of
from fedkeep.agent.record import (
    SAMPLE,
    SampleForm,
    SampleMetadata,
    decode_arrays,
    decode_note,
    newest_of,
    split_content,
)
from fedkeep.agent.sample_ids import SampleIds
from fedkeep.agent.store_file import PAYLOAD, discard_copies, find_label, superfluous
from fedkeep.agent.store_moves import clear_away
from fedkeep.agent.store_moves import rekey as store_rekey
from fedkeep.core.errors import ConfigError, optional_import
from fedkeep.core.state import strip_prefix
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray
from fedkeep.core.waiting import UNLABELLED
from fedkeep.encoding import EncodingName
from fedkeep.files import atomic_write, temp_path
from fedkeep.protocol.printing import printable

_TRIED = 1000
"""About how many samples are deflated to see what it would give."""
_PAYS = 0.9
_MOST_ALIKE, _LONGEST_NAME = 10_000, 180
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
    """Their samples, (n, ...), float32; none where samples are files."""
    payloads: list[bytes] | None
    """Their files, where samples are files."""
    ids: SampleIds
    """How ids are numbered there."""
    bytes_used: int
    deflated: list[int]
    """The bytes that some of the samples would take deflated, without loss, ascending.

    None where it does not pay.
    """


def inspect(path: Path, cipher: Cipher | None = None, *, repair: bool = False) -> Inspected:
    """Read a file without changing a byte of it.

    With `repair`, writes roots and labels anew over what is whole, as an agent does at its start.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file" if path.exists() else f"there is no file {path}")
    label, whole = find_label(path, cipher)
    with closing(FileDisk(path, label.geometry.size if repair else None)) as disk:
        file = CellFile(disk, label.geometry, cipher)
        found = file.load()
        used = file.bytes_used
        gone = superfluous(found, label.form.get("capacity", len(found)))
        blobs = [blob for blob in found if blob.number not in gone]
        form = _form(label)
        codec = form.codec()
        newest = newest_of(blobs)
        state = decode_arrays(newest)
        sources = restore_codec(codec, state, newest)
        samples = [blob for blob in blobs if blob.kind == SAMPLE]
        split = [split_content(blob, decode_note(blob, sources), form) for blob in samples]
        rows, notes = [row for row, _ in split], [note for _, note in split]
        is_file = form.payload_bytes is not None
        x = np.zeros((len(rows), 0), np.float32) if is_file else codec.decode(rows)
        if repair:
            if file.damage:
                file.discard(gone)
            file.commit([], [], wipe=True)
            file.write_label(label)
    deflated = [] if is_file else sorted(codec.deflated_sizes(rows[:: len(rows) // _TRIED + 1]))
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
    payloads = [rows[i] for i in order] if is_file else None
    return Inspected(label, wrong, ranked, x[order], payloads, ids, used, deflated)


def _form(label: Label) -> SampleForm:
    """Return what samples look like in a store with this label."""
    known = label.form
    name, extra, names = known["dtype"], known.get("extra_bytes", 0), known.get("name_bytes", 0)
    width = known.get("targets", 0)
    targets = NumberTargets(tuple(known.get("edges", ())), width) if width else None
    if name == PAYLOAD:
        dtype, most = np.dtype(np.float32), known["payload_bytes"]
        return SampleForm(
            dtype,
            (),
            name_bytes=names,
            targets=targets,
            extra_bytes=extra,
            payload_bytes=most,
        )
    encoding = name if name in get_args(EncodingName) else None
    return SampleForm(
        np.dtype("<f4" if encoding else name),
        tuple(known["shape"]),
        encoding,
        known["deflate_to"],
        name_bytes=names,
        targets=targets,
        extra_bytes=extra,
    )


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
    typer.echo(_summary(file, inspect(file, cipher, repair=True)))
    typer.echo(f"repaired: {len(inspect(file, cipher).notes)} samples are left")


@store.command()
def show(file: File, key_file: KeyFile = None, key_env: KeyEnv = None, limit: Limit = 20) -> None:
    """Show what is stored: samples per label, and the newest of them."""
    found = inspect(file, cipher_of(key_file, key_env))
    console = Console()
    names = found.label.form.get("names", ())
    counts = Counter(note.label for note in found.notes)
    named = "interval" if any(note.target for note in found.notes) else "label"
    console.print(
        ", ".join(
            f"{named} {_plain(label_name(label, names))}: {count}"
            for label, count in sorted(counts.items())
        )
        or "empty"
    )
    target = "number" if named == "interval" else "label"
    table = Table("id", target, "value", "uses", "stored at", "source")
    for note in reversed(found.notes[-limit:] if limit else []):
        table.add_row(
            _plain(note.name or str(note.id)),
            ", ".join(f"{number:.6g}" for number in note.target)
            or _plain(label_name(note.label, names)),
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
        list[str] | None,
        typer.Option(help="Only samples of this label, by number or name; may be repeated."),
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="Only samples from this source; may be repeated.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="Only samples that this rule held; may be repeated.")
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
    names = found.label.form.get("names", ())
    named = _numbers(found, id_ or [], namespace)
    if namespace is not None and not id_:
        raise ConfigError("--namespace says which --id is meant: give that, too, or --source")
    chosen = [
        i
        for i, note in enumerate(found.notes)
        if (not id_ or note.id in named or (namespace is None and note.name in id_))
        and (not label or str(note.label) in label or label_name(note.label, names) in label)
        and (not source or note.source in source)
        and (first is None or note.wall >= first)
        and (last is None or note.wall <= last)
        and (not rule or not {*rule}.isdisjoint(note.rules))
    ]
    notes = [found.notes[i] for i in chosen]
    if found.payloads is None:
        write_samples(out, notes, names, x=found.x[chosen])
        what = f"samples of shape {list(found.x.shape[1:])}"
    else:
        write_samples(out, notes, names, payloads=[found.payloads[i] for i in chosen])
        what = "files"
    typer.echo(f"{len(chosen)} {what} written to {out}")


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

    The file before is overwritten once the new one is whole; until then both are there. So are the
    copies of damaged files beside it.
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
    discard_copies(path)
    known = f"encrypted under the key {new.name}" if new else "not encrypted"
    typer.echo(f"{file} is now {known} and has {size} bytes; set key_file or key_env to match")


def _numbers(found: Inspected, ids: list[str], namespace: str | None) -> set[int]:
    """Return the numbers by which samples of these ids are known."""
    sources = {note.source for note in found.notes if note.source}
    return {number for id_ in ids for number in found.ids.matches(id_, sources, namespace)}


def _plain(text: str) -> str:
    """Text from outside for a cell of a table: no markup, nothing that a terminal obeys."""
    return escape(printable(text))


def write_samples(
    out: Path,
    notes: Sequence[SampleMetadata],
    labels: Sequence[str] = (),
    *,
    x: AnyArray | None = None,
    payloads: Sequence[bytes] | None = None,
) -> None:
    """Write samples in the form that the name of `out` asks for, all of them or none.

    Parameters
    ----------
    out
        A .npz or .parquet file, or a folder that is made.
    notes
        What is known of each sample.
    labels
        The names of labels, where they have some.
    x, payloads
        The samples: numbers, or files.
    """
    columns = {
        "y": _targets(notes),
        "ids": np.array([note.id for note in notes], dtype=np.int64),
        "names": np.array([note.name or str(note.id) for note in notes], dtype=np.str_),
        "scores": np.array([note.score for note in notes]),
        "times": np.array([note.wall for note in notes]),
        "sources": np.array([note.source for note in notes], dtype=np.str_),
    }
    if labels:
        columns["labels"] = np.array([label_name(n.label, labels) for n in notes], dtype=np.str_)
    if any(note.time == note.time for note in notes):
        columns["own_times"] = np.array([note.time for note in notes])
    if out.suffix == ".npz":
        _write_npz(out, columns, x, payloads)
    elif out.suffix == ".parquet":
        _write_parquet(out, columns, x, payloads)
    else:
        _write_folder(out, notes, labels, x, payloads)


def _targets(notes: Sequence[SampleMetadata]) -> AnyArray:
    """Return labels, or the numbers to predict, (n,) or (n, width)."""
    if any(note.target for note in notes):
        rows = np.array([note.target for note in notes])
        return rows[:, 0] if rows.shape[1] == 1 else rows
    return np.array([note.label for note in notes], dtype=np.int64)


def label_name(label: int, labels: Sequence[str]) -> str:
    """Return a label's name, or its number where it has none; a sample may wait for its label."""
    if label == UNLABELLED:
        return "unlabelled"
    return labels[label] if 0 <= label < len(labels) else str(label)


def _write_npz(
    out: Path,
    columns: dict[str, AnyArray],
    x: AnyArray | None,
    payloads: Sequence[bytes] | None,
) -> None:
    """Write one archive; files stand one behind the other in `payloads`, each up to its `end`."""
    if payloads is not None:
        columns["payloads"] = np.frombuffer(b"".join(payloads), np.uint8)
        columns["ends"] = np.cumsum([len(payload) for payload in payloads], dtype=np.int64)
    else:
        assert x is not None
        columns = {"x": x, **columns}
    with atomic_write(out, _PRIVATE) as file:
        np.savez_compressed(file, allow_pickle=False, **columns)


def _write_parquet(
    out: Path,
    columns: dict[str, AnyArray],
    x: AnyArray | None,
    payloads: Sequence[bytes] | None,
) -> None:
    with optional_import("writing Parquet", "parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    lists = {name: pa.array(column.tolist()) for name, column in columns.items()}
    if payloads is not None:
        table = pa.table({"payload": pa.array(payloads, pa.binary()), **lists})
    else:
        assert x is not None
        rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), int(np.prod(x.shape[1:])))
        table = pa.table({"x": rows, **lists})
        table = table.replace_schema_metadata({"shape": str(list(x.shape[1:]))})
    with atomic_write(out, _PRIVATE) as file:
        pq.write_table(table, file)


def _write_folder(
    out: Path,
    notes: Sequence[SampleMetadata],
    labels: Sequence[str],
    x: AnyArray | None,
    payloads: Sequence[bytes] | None,
) -> None:
    """Write a folder for each label, with a file for each sample, called as the sample is."""
    if any(note.target for note in notes):
        raise ConfigError(
            "these samples have numbers to predict, and folders have no place for them: name a "
            "file that ends in .npz or .parquet"
        )
    new = temp_path(out)
    new.mkdir(_PRIVATE_FOLDER)
    try:
        for place, note in enumerate(notes):
            folder = new / _file_name(label_name(note.label, labels))
            folder.mkdir(_PRIVATE_FOLDER, exist_ok=True)
            name = _file_name(note.name or str(note.id))
            suffix = ".npy" if payloads is None else suffix_of(payloads[place])
            if payloads is None or not name.endswith(suffix):
                name += suffix
            with open_new(folder / name) as file:
                if payloads is not None:
                    file.write(payloads[place])
                else:
                    assert x is not None
                    np.save(file, x[place], allow_pickle=False)
        new.rename(out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def open_new(path: Path) -> IO[bytes]:
    """Open a file that is not there yet, for its owner only; one of its name gets a number.

    Two sources may have called their samples alike.
    """
    for number in range(_MOST_ALIKE):
        tried = path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path
        try:
            return os.fdopen(os.open(tried, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "wb")
        except FileExistsError:
            continue
    raise ConfigError(f"{path} exists {_MOST_ALIKE} times: move some away")


def _file_name(name: str) -> str:
    """Return a name from outside as one that a folder can hold, in it and nowhere else."""
    quoted = quote(name, safe=" ")[:_LONGEST_NAME]
    return {"": "%", ".": "%2E", "..": "%2E%2E"}.get(quoted, quoted)


def when(time: float) -> str:
    """Write a time of the device's clock for people."""
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _summary(file: Path, found: Inspected) -> str:
    geometry, form = found.label.geometry, found.label.form
    labels = len({note.label for note in found.notes} - {UNLABELLED})
    what = (
        f"{len(found.notes)} files, {labels} labels"
        if found.payloads is not None
        else f"{len(found.notes)} samples of {np.dtype(form['dtype'])} {form['shape']}, "
        f"{labels} labels"
    )
    size = f"{found.bytes_used} of {geometry.size} bytes"
    if found.payloads is None:
        size += f", {geometry.cell_size} per sample"
    return f"{file}: {what}; {size}; {'; '.join(found.wrong) or 'sound'}"
