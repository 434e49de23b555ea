"""`fedkeep run`: an experiment file, every method and seed of it."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console

from fedkeep.cli.progress import download_progress, sweep_progress, time_in_words
from fedkeep.cli.report import print_tables
from fedkeep.config import override, read_experiment
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.records import compare, read_runs
from fedkeep.sim.assembly import load_data
from fedkeep.sim.experiment import Cell, expand
from fedkeep.sim.runner import is_finished, record_path
from fedkeep.sim.sweep import Place, estimate_seconds, processors, run_sweep

Jobs = Annotated[int, typer.Option(min=1, help="Runs at a time.", show_default="one per processor")]
On = Annotated[
    str, typer.Option(metavar="here|ray", help="Where runs are played: on this machine, or on a Ray cluster.")
]
PROCESSORS = os.cpu_count() or 1


def run(
    file: Annotated[Path, typer.Argument(help="An experiment (TOML); see experiments/ for the paper's.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any key of the file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the records go. [default: runs/NAME]")] = None,
    jobs: Jobs = PROCESSORS,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier call stopped.")] = False,
    on: On = "here",
) -> None:
    """Run an experiment and print what it showed."""
    cells = expand(override(read_experiment(file), settings or []))
    directory = out if out is not None else Path("runs") / file.stem
    play_all(cells, directory, jobs=jobs, resume=resume, on=place(on))
    print_tables(compare(read_runs(directory)))


def place(name: str) -> Place:
    """Where runs are to be played, by its name."""
    if name not in get_args(Place):
        raise ConfigError(f"--on takes here or ray, got '{name}'")
    return cast(Place, name)


def play_all(cells: Sequence[Cell], directory: Path, *, jobs: int, resume: bool, on: Place = "here") -> None:
    """Runs the cells with one progress display, and says beforehand how long it will take."""
    console = Console(stderr=True)
    make_folder(directory)
    if not resume and any(record_path(cell, directory).exists() for cell in cells):
        raise FedkeepError(f"{directory} holds records already: add --resume to go on, or --out for another place")
    waiting = [cell for cell in cells if not (resume and is_finished(cell, directory))]
    if not waiting:
        return
    with download_progress(console) as progress:  # what is missing, once, before anything runs
        for experiment in {cell.experiment.names["task"]: cell.experiment for cell in reversed(waiting)}.values():
            load_data(experiment.task, experiment.seed, progress)
    jobs = processors() if on == "ray" else jobs
    seconds = estimate_seconds(waiting, jobs)
    console.print(f"{len(waiting)} of {len(cells)} runs to do, about {time_in_words(seconds)} with {jobs} at a time.")
    try:
        with sweep_progress(cells, console) as listen:
            run_sweep(cells, directory, jobs=jobs, resume=resume, listen=listen, on=on)
    except KeyboardInterrupt:
        command = shlex.join(["fedkeep", *sys.argv[1:], *([] if resume else ["--resume"])])
        raise FedkeepError(f"stopped; what is done is in {directory}. Go on with: {command}") from None


def make_folder(directory: Path) -> None:
    """Makes the folder for records now, so that one that cannot be is told before anything runs."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot keep records in {directory}: {error.strerror}"
        raise FedkeepError(f"{why}; choose another with --out") from error
