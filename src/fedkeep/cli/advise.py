"""`fedkeep advise`: what to keep, on one's own data, in words."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import progress as bars
from rich.console import Console

from fedkeep.cli.run import (
    DESCRIPTION,
    PROCESSORS,
    BackendName,
    FormerBackend,
    Jobs,
    backend_of,
    time_in_words,
)
from fedkeep.core.errors import ConfigError
from fedkeep.files import folder_for_records
from fedkeep.sim.sweep import processors

_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1_000_000, "kib": 1024, "mib": 1024**2}


def advise(
    data: Annotated[
        str,
        typer.Argument(help="A .csv, .parquet or .npz file, or module:function; a sample will do."),
    ],
    bytes_: Annotated[
        str | None,
        typer.Option(
            "--bytes", metavar="SIZE", help="The whole store of a device, e.g. 500kB, to the byte."
        ),
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
    time: Annotated[
        str | None, typer.Option(help="The column of times, whose order samples arrive in.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=2, help="Divide the samples among so many devices, if the data names none."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="softmax, mlp, or module:factory.")] = "softmax",
    target: Annotated[
        str | None,
        typer.Option(help="What the label is: class, or number to predict. [default: as it looks]"),
    ] = None,
    jobs: Jobs = PROCESSORS,
    backend: BackendName = "local",
    on: FormerBackend = None,
    out: Annotated[
        Path | None, typer.Option(help="Where everything goes. [default: advice/NAME]")
    ] = None,
) -> None:
    """Say what devices should keep of data like yours.

    Tries FIFO, class-balanced FIFO, a balanced reservoir with and without a gist, ODE and unlimited
    storage on it, each at its own learning rate, and ends in words: what to use, by how much, how
    certain that is, what a larger store or a gist would gain, and what to watch out for. Ctrl-C
    keeps what is done; the same call goes on from there.
    """
    # Advice knows agents, too: `fedkeep --help` should not wait for all that.
    from fedkeep.advice import advise as ask_for_advice
    from fedkeep.advice.advisor import folder_of

    folder = out if out is not None else folder_of(data)
    folder_for_records(folder)
    chosen = backend_of(backend, on)
    jobs = processors() if chosen == "ray" else jobs
    with _stage_progress() as on_progress:
        found = ask_for_advice(
            data,
            bytes=None if bytes_ is None else _size(bytes_),
            capacity=capacity,
            participation=participation,
            minutes=minutes,
            shuffled=shuffled,
            drift=drift,
            device=device,
            label=label,
            time=time,
            devices=devices,
            model=model,
            target=_target(target),
            jobs=jobs,
            backend=chosen,
            out=folder,
            on_progress=on_progress,
            on_start=lambda sentence: typer.echo(sentence, err=True),
        )
    typer.echo(str(found))
    for path in found.files:
        typer.echo(f"wrote {path}", err=True)


def _target(text: str | None) -> Literal["class", "number"] | None:
    """Return what the label is, as `--target` says it."""
    known: dict[str | None, Literal["class", "number"] | None] = {
        None: None, "class": "class", "number": "number",
    }  # fmt: skip
    if text in known:
        return known[text]
    raise ConfigError(f"--target takes class or number, got '{text}'")


def _size(text: str) -> int:
    """Return a size in bytes, such as 50kB or 2MiB."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if not found or found[2].lower() not in _UNITS:
        raise ConfigError(f"--bytes takes a size such as 500kB or 2MiB, got '{text}'")
    size = float(found[1]) * _UNITS[found[2].lower()]
    if size > 2**63:
        raise ConfigError(f"--bytes is more than any device has, got '{text}'")
    return int(size)


@contextmanager
def _stage_progress() -> Iterator[Callable[[str, float, float], None]]:
    """Show a bar with the time left in a terminal; elsewhere a line a stage."""
    console = Console(stderr=True)
    columns = (bars.BarColumn(), bars.TextColumn("{task.percentage:3.0f} %"), DESCRIPTION)
    with bars.Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=1.0)
        stages: set[str] = set()

        def show(stage: str, share: float, seconds_left: float) -> None:
            words = f"{stage}, about {time_in_words(seconds_left)} left"
            progress.update(bar, completed=share, description=words)
            if stage not in stages and not console.is_terminal:
                console.print(words)
            stages.add(stage)

        yield show
