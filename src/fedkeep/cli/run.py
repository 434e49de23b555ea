"""`fedkeep run`: an experiment file, every method and seed of it."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich import progress as bars
from rich.console import Console

from fedkeep.cli.report import print_tables
from fedkeep.config.aliases import current_option
from fedkeep.config.experiment import RunSpec, expand, override, read_experiment
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.files import folder_for_records
from fedkeep.records import compare, read_runs
from fedkeep.records.measures import has_diverged
from fedkeep.sim.assembly import load_data
from fedkeep.sim.runner import is_finished, record_path
from fedkeep.sim.sweep import Backend, Listener, estimate_seconds, processors, run_sweep

Jobs = Annotated[int, typer.Option(min=1, help="Runs at a time.", show_default="one per processor")]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="local|ray",
        help="Where runs are played: on this machine, or on a Ray cluster.",
    ),
]
FormerBackend = Annotated[str | None, typer.Option("--on", hidden=True)]
PROCESSORS = os.cpu_count() or 1
DESCRIPTION = bars.TextColumn("{task.description}")


def run(
    file: Annotated[
        Path, typer.Argument(help="An experiment (TOML); see experiments/ for the paper's.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change any key of the file."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the records go. [default: runs/NAME]")
    ] = None,
    jobs: Jobs = PROCESSORS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an earlier call stopped.")
    ] = False,
    backend: BackendName = "local",
    on: FormerBackend = None,
) -> None:
    """Run an experiment and print what it showed."""
    cells = expand(override(read_experiment(file), settings or []))
    directory = out if out is not None else Path("runs") / file.stem
    play_all(cells, directory, jobs=jobs, resume=resume, backend=backend_of(backend, on))
    names = {record_path(cell, directory) for cell in cells}
    runs = read_runs(directory)
    print_tables(compare(runs))
    diverged = [run.header.run for run in runs if run.path in names and has_diverged(run)]
    if diverged:
        raise FedkeepError(
            f"{len(diverged)} of {len(cells)} runs diverged ({', '.join(diverged[:5])}): lower "
            "train.learning_rate"
        )


def backend_of(name: str, former: str | None) -> Backend:
    """Check the value of `--backend`, or of the option that it was before."""
    if former is not None:
        name = current_option("--on", former)
    if name not in get_args(Backend):
        raise ConfigError(f"--backend takes local or ray, got '{name}'")
    return cast(Backend, name)


def play_all(
    cells: Sequence[RunSpec],
    directory: Path,
    *,
    jobs: int,
    resume: bool,
    backend: Backend = "local",
) -> None:
    """Execute the runs with one progress display; print beforehand how long it will take."""
    console = Console(stderr=True)
    folder_for_records(directory)
    if not resume and any(record_path(cell, directory).exists() for cell in cells):
        raise FedkeepError(
            f"{directory} holds records already: add --resume to go on, or --out for another place"
        )
    waiting = [cell for cell in cells if not (resume and is_finished(cell, directory))]
    if not waiting:
        return
    with _download_progress(console) as progress:  # what is missing, once, before anything runs
        for experiment in {
            cell.experiment.names["task"]: cell.experiment for cell in reversed(waiting)
        }.values():
            load_data(experiment.task, experiment.seed, progress)
    jobs = processors() if backend == "ray" else min(jobs, len(waiting))
    seconds = estimate_seconds(waiting, jobs)
    console.print(
        f"{len(waiting)} of {len(cells)} runs to do, "
        f"about {time_in_words(seconds)} with {jobs} at a time."
    )
    try:
        with _sweep_progress(cells, console) as listen:
            run_sweep(cells, directory, jobs=jobs, resume=resume, listen=listen, backend=backend)
    except KeyboardInterrupt:
        command = shlex.join(["fedkeep", *sys.argv[1:], *([] if resume else ["--resume"])])
        raise FedkeepError(
            f"stopped; what is done is in {directory}. Go on with: {command}"
        ) from None


@contextmanager
def _sweep_progress(cells: Sequence[RunSpec], console: Console) -> Iterator[Listener]:
    """Show a bar for all rounds and a line for the latest run; nothing without a terminal."""
    total = sum(cell.experiment.train.rounds for cell in cells)
    count = (bars.MofNCompleteColumn(), bars.TextColumn("rounds"))
    columns = (DESCRIPTION, bars.BarColumn(), *count, bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{len(cells)} runs", total=total)
        done = [0] * len(cells)

        def listen(cell: int, round_: int, accuracy: float | None) -> None:
            done[cell] = round_
            reached = "" if accuracy is None else f" at {accuracy:.1%}"
            progress.update(bar, completed=sum(done), description=f"{cells[cell].name}{reached}")

        yield listen
        progress.update(bar, completed=total, description=f"{len(cells)} runs")


@contextmanager
def _download_progress(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    columns = (DESCRIPTION, bars.BarColumn(), bars.DownloadColumn(), bars.TimeRemainingColumn())
    with bars.Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        known: dict[str, bars.TaskID] = {}

        def show(name: str, done: int, total: int | None) -> None:
            if name not in known:
                known[name] = progress.add_task(f"downloading {name}", total=total)
            progress.update(known[name], completed=done, total=total)

        yield show


def time_in_words(seconds: float) -> str:
    """Write a span of time for people.

    >>> time_in_words(0.2), time_in_words(200), time_in_words(9000)
    ('1 s', '3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
