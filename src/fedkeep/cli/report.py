"""`fedkeep report`: the results of a directory of runs, in the terminal, as Markdown and HTML."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedkeep.core.errors import DataError
from fedkeep.core.registry import did_you_mean
from fedkeep.records import Comparison, Run, compare, read_runs
from fedkeep.records import tables as words
from fedkeep.records.figures import accuracy_figure
from fedkeep.records.tensorboard import write_events
from fedkeep.web.report import html as page


def report(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where `fedkeep run --out` wrote to.")
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the charts as one self-contained page."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables as Markdown.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every evaluation as a row of CSV.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comparison as JSON.")
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all tables as LaTeX (booktabs).")
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the accuracy as a figure: .pdf, .svg or .png."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write every run as event files of TensorBoard."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            help="Compare with this method; may be repeated. [default: fifo or reservoir]",
        ),
    ] = None,
) -> None:
    """Compare methods: which is better, by how much, how certain.

    Compares all runs in a directory, seed by seed: final and best accuracy, the mean accuracy over
    rounds, and the speedup to where another method ends.
    """
    runs = read_runs(directory)
    methods = {run.header.method for run in runs}
    for base in set(against or ()) - methods:
        raise DataError(
            f"no run of a method '{base}' to compare with: {did_you_mean(base, methods)}"
        )
    comparison = compare(runs, against or ())
    print_tables(comparison)
    if markdown is not None:
        write(markdown, words.markdown(comparison))
    if csv is not None:
        write(csv, words.as_csv(runs))
    if json is not None:
        write(json, msgspec.json.format(msgspec.json.encode(comparison), indent=1).decode() + "\n")
    if latex is not None:
        write(latex, words.latex(comparison))
    if figure is not None:
        _write_figure(runs, figure)
    if tensorboard is not None:
        for folder in write_events(runs, tensorboard):
            typer.echo(f"wrote {folder}", err=True)
    if html is not None:
        write(html, page(runs, comparison, directory.resolve().name))


def print_tables(comparison: Comparison) -> None:
    """Print the tables of a comparison in the terminal."""
    console = Console()
    for table in words.tables(comparison):
        if not console.is_terminal:
            console = Console(width=max(console.width, _width(table)))
        elif _width(table) > console.width:
            console.print(Text(words.as_text(table, console.width)), soft_wrap=True)
            continue
        drawn = Table(title=Text(table.title), title_justify="left")
        for place, name in enumerate(table.columns):
            drawn.add_column(Text(name), justify="right" if place else "left", no_wrap=not place)
        for row in table.rows:
            drawn.add_row(*map(Text, row))
        console.print(drawn)
    for sentence in words.sentences(comparison):
        console.print(Text(sentence))
    for note in (*comparison.notes, words.explanation(comparison)):
        console.print(Text(note, style="dim"))


def _width(table: words.ReportTable) -> int:
    """Return the columns of a terminal that a table needs with its frame."""
    cells = zip(table.columns, *table.rows, strict=True)
    return sum(max(map(len, column)) + 3 for column in cells) + 1


def _write_figure(runs: Sequence[Run], path: Path) -> None:
    if path.suffix.lower() not in (".pdf", ".svg", ".png"):
        raise DataError(f"a figure is a .pdf, .svg or .png file, got {path}")
    drawn = accuracy_figure(runs)
    try:
        drawn.savefig(path, dpi=200)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)


def write(path: Path, text: str) -> None:
    """Write a report; a DataError says why it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)
