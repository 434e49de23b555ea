"""`fedkeep paper`: the paper's own experiments, from an installed package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.report import print_tables
from fedkeep.cli.run import PROCESSORS, BackendName, Jobs, backend_of, play_all
from fedkeep.config.experiment import RunSpec, expand, override, read_experiment
from fedkeep.config.shipped import EXPERIMENTS, find_experiment, paper_row, tasks_of
from fedkeep.core.errors import ConfigError
from fedkeep.core.registry import did_you_mean
from fedkeep.records import compare, read_runs


def paper(
    experiment: Annotated[
        str | None,
        typer.Argument(help="Which experiment; left out, all are listed with their tasks."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Which of its tasks: st, ic, har, tc and their variants.")
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help="Only this method; may be given again.")
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="Only this seed; may be given again.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change any key of the file."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the records go. [default: runs/EXPERIMENT/TASK]")
    ] = None,
    jobs: Jobs = PROCESSORS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an earlier call stopped.")
    ] = False,
    backend: BackendName = "local",
) -> None:
    """Run an experiment of the paper beside its numbers.

    Data that can be downloaded is; where that fails, one sentence says what to fetch and where to
    put it. Without an argument nothing runs.
    """
    if experiment is None:
        for name, about in EXPERIMENTS.items():
            typer.echo(f"{name}: {about}")
            typer.echo(f"  --task {', '.join(tasks_of(name))}")
        return
    file = find_experiment(experiment, task)
    cells = chosen(expand(override(read_experiment(file), settings or [])), methods, seeds)
    directory = out if out is not None else Path("runs") / experiment / file.stem
    play_all(cells, directory, jobs=jobs, resume=resume, backend=backend_of(backend, None))
    print_tables(compare(read_runs(directory)))
    if experiment == "table2" and (row := paper_row(file.stem)):
        typer.echo("\nThe paper's row (accuracy in %, speedup over FIFO):")
        for method, cell in row.items():
            speedup = "never" if cell.speedup is None else f"{cell.speedup:g}x"
            typer.echo(f"  {method:14} {cell.accuracy:6.2f}  {speedup}")


def chosen(
    cells: Sequence[RunSpec], methods: Sequence[str] | None, seeds: Sequence[int] | None
) -> list[RunSpec]:
    """Return the runs of these methods and seeds; of all, where none are named.

    Raises
    ------
    ConfigError
        If one of them is not in the experiment.
    """
    known = list(dict.fromkeys(cell.experiment.label for cell in cells))
    for method in methods or ():
        if method not in known:
            hint = did_you_mean(method, known)
            raise ConfigError(f"the experiment has no method '{method}': {hint}")
    drawn = sorted({cell.experiment.seed for cell in cells})
    for seed in seeds or ():
        if seed not in drawn:
            raise ConfigError(
                f"the experiment has no seed {seed}: it has {', '.join(map(str, drawn))}; "
                "name others with --set 'sweep.seed=[...]'"
            )
    return [
        cell
        for cell in cells
        if cell.experiment.label in (methods or known) and cell.experiment.seed in (seeds or drawn)
    ]
