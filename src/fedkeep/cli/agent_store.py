"""`fedkeep agent store`: looks into a store's file, mends it and takes samples out, without an agent."""

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from fedkeep.agent.cipher import cipher_of
from fedkeep.agent.inspecting import Inspected, export, inspect

store = typer.Typer(
    help="Look into a store's file, mend it, take samples out.", no_args_is_help=True, rich_markup_mode=None
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The store, as in [store] path.")]
KeyFile = Annotated[Path | None, typer.Option(help="The file with the key under which it is encrypted.")]
KeyEnv = Annotated[str | None, typer.Option(help="The environment variable with that key.")]


@store.command()
def check(file: File, key_file: KeyFile = None, key_env: KeyEnv = None) -> None:
    """Say what is in a store and whether it is sound; exit code 1 if it is not."""
    found = inspect(file, cipher_of(key_file, key_env))
    typer.echo(_summary(file, found))
    if found.deflated:
        median, most = found.deflated[len(found.deflated) // 2], found.deflated[len(found.deflated) * 19 // 20]
        typer.echo(f"deflated, half of the samples take {median} bytes and 19 of 20 {most}: see [store] deflate_to")
    if found.damage or found.damage.root_copies or not found.labels_whole:
        raise typer.Exit(1)


@store.command("repair")
def repair_(file: File, key_file: KeyFile = None, key_env: KeyEnv = None) -> None:
    """Write roots and labels anew over all that is whole; no agent may be running on it."""
    cipher = cipher_of(key_file, key_env)
    typer.echo(_summary(file, inspect(file, cipher, mend=True)))
    typer.echo(f"mended: {len(inspect(file, cipher).notes)} samples go on")


@store.command()
def show(
    file: File,
    key_file: KeyFile = None,
    key_env: KeyEnv = None,
    limit: Annotated[int, typer.Option(min=0, help="Samples to list, newest first.")] = 20,
) -> None:
    """Show what is stored: samples per label, and the newest of them."""
    found = inspect(file, cipher_of(key_file, key_env))
    console = Console()
    counts = Counter(note.label for note in found.notes)
    console.print(", ".join(f"label {label}: {count}" for label, count in sorted(counts.items())) or "empty")
    table = Table("id", "label", "value", "uses", "stored at", "source")
    for note in reversed(found.notes[-limit:] if limit else []):
        table.add_row(str(note.id), str(note.label), f"{note.score:.4g}", str(note.uses), when(note.wall), note.source)
    console.print(table)


@store.command("export")
def export_(
    file: File,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .npz or .parquet file, or a folder.")],
    key_file: KeyFile = None,
    key_env: KeyEnv = None,
) -> None:
    """Write all samples with their labels, ids and values to a file, or one file each into a folder per label."""
    found = inspect(file, cipher_of(key_file, key_env))
    export(found, out)
    typer.echo(f"{len(found.notes)} samples of shape {list(found.x.shape[1:])} written to {out}")


def when(time: float) -> str:
    """A time of the device's clock, to be read."""
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _summary(file: Path, found: Inspected) -> str:
    geometry, form, damage = found.label.geometry, found.label.form, found.damage
    labels = len({note.label for note in found.notes})
    what = f"{len(found.notes)} samples of {np.dtype(form['dtype'])} {form['shape']}, {labels} labels"
    size = f"{found.bytes_used} of {geometry.size} bytes, {geometry.cell_size} per sample"
    wrong = [str(damage)] if damage else []
    wrong += [f"{damage.root_copies} copies of a root are damaged"] if damage.root_copies else []
    wrong += [] if found.labels_whole else ["one label is damaged"]
    return f"{file}: {what}; {size}; {'; '.join(wrong) or 'sound'}"
