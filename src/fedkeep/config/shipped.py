"""The paper's experiments, which come with the package: what `fedkeep paper` runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import fedkeep
from fedkeep.core.errors import ConfigError
from fedkeep.core.registry import did_you_mean
from fedkeep.tables import read_toml

EXPERIMENTS = {
    "table2": "final accuracy and speedup of all methods (Table 2)",
    "ablation": "ODE without one of its parts (the journal's Fig. 17)",
    "simplified": "gradients of the last layers only (the journal's Fig. 9)",
    "coordination": "the paper's greedy plan, ours and the optimum of Eq. 9 (`fedkeep[plan]`)",
    "robustness": "epochs, participation, stores, mini-batches, labels a device, wrong velocities",
    "motivation": "what limited storage and streams cost (the journal's Fig. 1, Tables II and III)",
    "authors": "the columns of Table 2 as the authors' code runs them",
}
"""Folders of experiment files, and what each shows."""


def folder() -> Path:
    """Find the experiment files.

    In an installed package beside its modules, else in the repository.

    Returns
    -------
    Path
        The folder that holds `table2`, `tasks` and the rest.

    Raises
    ------
    ConfigError
        If neither is there.
    """
    package = Path(fedkeep.__file__).parent
    for place in (package / "experiments", package.parents[1] / "experiments"):
        if (place / "table2").is_dir():
            return place
    raise ConfigError("the paper's experiment files are missing: install fedkeep anew")


def tasks_of(experiment: str) -> Mapping[str, Path]:
    """List the tasks of an experiment.

    Parameters
    ----------
    experiment : str
        A key of `EXPERIMENTS`.

    Returns
    -------
    mapping of str to Path
        Its files by the names of their tasks.

    Raises
    ------
    ConfigError
        If there is no such experiment.
    """
    if experiment not in EXPERIMENTS:
        hint = did_you_mean(experiment, EXPERIMENTS)
        raise ConfigError(f"unknown experiment '{experiment}': {hint}")
    return {path.stem: path for path in sorted((folder() / experiment).glob("*.toml"))}


def find_experiment(experiment: str, task: str | None) -> Path:
    """Find the file of an experiment on a task.

    Parameters
    ----------
    experiment : str
        A key of `EXPERIMENTS`.
    task : str or None
        One of `tasks_of`; None where there is one alone.

    Returns
    -------
    Path
        An experiment file.

    Raises
    ------
    ConfigError
        If there is no such file.

    Examples
    --------
    >>> find_experiment("table2", "ic").name
    'ic.toml'
    """
    files = tasks_of(experiment)
    if task is None and len(files) > 1:
        raise ConfigError(f"say on which task with --task: {', '.join(files)}")
    chosen = task or next(iter(files))
    if chosen not in files:
        raise ConfigError(f"{experiment} has no task '{chosen}': {did_you_mean(chosen, files)}")
    return files[chosen]


@dataclass(frozen=True)
class PaperCell:
    """What the paper reports of a method on a task."""

    accuracy: float
    """Final, in percent."""
    speedup: float | None
    """Rounds of FIFO over rounds of the method, to FIFO's final accuracy; None: never reached."""


def paper_row(task: str) -> dict[str, PaperCell]:
    """Read a row of the paper's Table 2.

    Parameters
    ----------
    task : str
        A task of `table2`; `ic-grey` has the row of `ic`.

    Returns
    -------
    dict of str to PaperCell
        By method; empty for a task that the paper does not have.

    Examples
    --------
    >>> paper_row("ic")["ode-est"]
    PaperCell(accuracy=72.7, speedup=1.2)
    """
    table = read_toml(folder() / "paper.toml")["table2"]
    row = task.partition("-")[0]
    if row not in table["accuracy"]:
        return {}
    cells = zip(table["accuracy"][row], table["speedup"][row], strict=True)
    return {
        method: PaperCell(accuracy, speedup or None)
        for method, (accuracy, speedup) in zip(table["columns"], cells, strict=True)
    }
