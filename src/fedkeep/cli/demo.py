"""`fedkeep demo`: the main job in under a minute, with nothing but the base install."""

import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.report import print_tables, write
from fedkeep.cli.run import PROCESSORS, play_all
from fedkeep.config.experiment import expand
from fedkeep.config.methods import method_tables
from fedkeep.files import folder_for_records
from fedkeep.records import compare, read_runs
from fedkeep.web.report import html
from fedkeep.web.server import LiveServer

EXPERIMENT = {
    "task": {"name": "demo"},
    "storage": {"capacity": 10},
    "train": {"rounds": 300, "participation": 0.1, "epochs": 5, "learning_rate": 0.02},
    "record": {"every": 10, "checkpoint_every": 1000},
    "methods": method_tables(
        ("fifo", "balanced-fifo", "ode", "gist-local", "gist-shared", "full-data")
    ),
    "sweep": {"seed": [0, 1, 2]},
}


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Where the records and the page go. [default: a new folder]")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the curves in a browser while they grow.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The page's port, with --watch; 0: any free one.")
    ] = 0,
) -> None:
    """Compare ways to use ten samples a device, in a minute.

    FIFO, class-balanced FIFO, ODE, the gist in both its forms and unlimited storage, three seeds
    each; writes report.html beside the records.
    """
    directory = out if out is not None else Path(tempfile.mkdtemp(prefix="fedkeep-demo-"))
    folder_for_records(directory)
    if watch:
        server = LiveServer(directory, port=port)
        typer.echo(f"Watch it at {server.url}", err=True)
        threading.Thread(target=server.run, daemon=True).start()
    play_all(expand(EXPERIMENT), directory, jobs=PROCESSORS, resume=True)
    runs = read_runs(directory)
    comparison = compare(runs)
    print_tables(comparison)
    write(directory / "report.html", html(runs, comparison, "fedkeep demo"))
    if watch:
        typer.echo("The page stays up until you press Ctrl-C.", err=True)
        threading.Event().wait()
