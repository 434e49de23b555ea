"""`fedkeep advise`: what to keep, on one's own data, in words."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import progress as bars
from rich.console import Console

from fedkeep.advice.trial import FIFO, Panel, Trial
from fedkeep.advice.verdict import DatasetProfile, describe, recommended
from fedkeep.advice.verdict import advise as judge
from fedkeep.cli.report import write
from fedkeep.cli.run import (
    DESCRIPTION,
    PROCESSORS,
    BackendName,
    FormerBackend,
    Jobs,
    backend_of,
    make_folder,
    time_in_words,
)
from fedkeep.config.experiment import resolve
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.records import compare, read_runs
from fedkeep.sim.assembly import build_learner, load_data
from fedkeep.sim.sweep import processors
from fedkeep.web.report import html

_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1_000_000, "kib": 1024, "mib": 1024**2}


def advise(
    data: Annotated[
        str,
        typer.Argument(help="A .csv, .parquet or .npz file, or module:function; a sample will do."),
    ],
    bytes_: Annotated[
        str | None,
        typer.Option("--bytes", metavar="SIZE", help="What a device can keep, e.g. 50kB."),
    ] = None,
    capacity: Annotated[int, typer.Option(min=1, help="Or in samples.")] = 10,
    participation: Annotated[
        float, typer.Option(help="The share of devices that takes part in a round.")
    ] = 0.1,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long it may take.")] = 4.0,
    shuffled: Annotated[
        bool,
        typer.Option(
            "--shuffled", help="The order of the rows is not time: let samples come in any order."
        ),
    ] = False,
    drift: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Strength of the simulated label shift, 0 to 1.")
    ] = 0.0,
    device: Annotated[str, typer.Option(help="The column that names the device.")] = "device",
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    devices: Annotated[
        int | None,
        typer.Option(
            min=2, help="Divide the samples among so many devices, if the data names none."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="softmax, mlp, or module:factory.")] = "softmax",
    jobs: Jobs = PROCESSORS,
    backend: BackendName = "local",
    on: FormerBackend = None,
    out: Annotated[
        Path | None, typer.Option(help="Where everything goes. [default: advice/NAME]")
    ] = None,
) -> None:
    """Say what devices should keep of data like yours.

    Tries FIFO, class-balanced FIFO, a balanced reservoir with and without a gist, ODE and unlimited
    storage on it, each at its own
    learning rate, and ends in words: what to use, by how much, how sure that is, what a larger store or a gist would
    buy, and what to worry about. Ctrl-C keeps what is done; the same call goes on from there.
    """
    folder = out if out is not None else Path("advice") / Path(data.partition(":")[0]).stem
    make_folder(folder)
    task = {"name": "custom", ("source" if ":" in data else "path"): data, "test_fraction": 0.2}
    task |= {"device": device, "label": label, "model": model}
    if devices:
        task["partition"] = {"name": "dirichlet", "devices": devices, "alpha": 0.3}
    experiment = resolve({"task": task, "policy": {"name": "fifo"}})
    federation = load_data(experiment.task, 0)
    seen = DatasetProfile(federation)
    # Two vectors of the model's length: the gist, and the mean of what came since.
    gist_bytes, gist_samples = 2 * 4 * build_learner(experiment, federation).gradient_size, 0
    if bytes_ is not None:
        capacity, gist_samples = (
            _samples(bytes_, seen.sample_bytes),
            -(-gist_bytes // seen.sample_bytes),
        )
    panel = Panel(
        task,
        capacity,
        participation,
        100,
        {"shuffle": shuffled, "drift": drift},
        gist_samples=gist_samples,
    )
    resolve(panel.table(FIFO, 0))  # a wish that cannot be is told before anything is measured
    typer.echo(f"{describe(seen)} Trying the methods with {capacity} of them a device.", err=True)
    chosen = backend_of(backend, on)
    jobs = processors() if chosen == "ray" else jobs
    with _stage_progress() as tell:
        trial = Trial(panel, folder, 60 * minutes, jobs, tell, chosen)
        complete = trial.run()
    if not trial.finals:
        raise FedkeepError(
            f"stopped before any run had ended: the same call goes on from there ({folder}), --minutes gives it longer"
        )
    advice = judge(trial, seen, gist_bytes, shuffled=shuffled, complete=complete)
    typer.echo("\n".join(advice))
    seeds = max(max(runs) for runs in trial.finals.values()) + 1
    for path in trial.panel.write_files(folder, recommended(trial), federation, seeds):
        typer.echo(f"wrote {path}", err=True)
    runs = [run for run in read_runs(folder / "runs") if run.end is not None]
    write(folder / "advice.html", html(runs, compare(runs), f"Advice on {Path(data).name}", advice))
    (folder / "advice.txt").write_text("\n".join([*advice, ""]), encoding="utf-8")


def _samples(size: str, sample_bytes: int) -> int:
    found = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", size)
    if not found or found[2].lower() not in _UNITS:
        raise ConfigError(f"--bytes takes a size such as 50kB or 2MiB, got '{size}'")
    samples = int(float(found[1]) * _UNITS[found[2].lower()] // sample_bytes)
    if samples < 1:
        raise ConfigError(
            f"{size} is less than one sample of this data, which takes {sample_bytes} bytes"
        )
    return samples


@contextmanager
def _stage_progress() -> Iterator[Callable[[str, float, float], None]]:
    """A bar with the time left in a terminal; elsewhere a line a stage."""
    console = Console(stderr=True)
    columns = (bars.BarColumn(), bars.TextColumn("{task.percentage:3.0f} %"), DESCRIPTION)
    with bars.Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=1.0)
        stages: set[str] = set()

        def tell(stage: str, share: float, seconds_left: float) -> None:
            words = f"{stage}, about {time_in_words(seconds_left)} left"
            progress.update(bar, completed=share, description=words)
            if stage not in stages and not console.is_terminal:
                console.print(words)
            stages.add(stage)

        yield tell
