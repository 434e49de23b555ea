"""One call from a data file to an advice: profile, trial, sentences, and files to use it."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from fedkeep.advice.budget import spend_on_device
from fedkeep.advice.profile import DatasetProfile, describe
from fedkeep.advice.trial import FIFO, Trial, TrialSettings, capacities_within
from fedkeep.advice.verdict import sentences
from fedkeep.config.experiment import resolve
from fedkeep.core.bounds import check_number, check_whole
from fedkeep.core.errors import ConfigError, DataError, FedkeepError
from fedkeep.files import folder_for_records
from fedkeep.records import compare, read_runs
from fedkeep.sim.assembly import build_learner, load_data
from fedkeep.sim.sweep import Backend
from fedkeep.tables import Table
from fedkeep.web.report import html

ProgressCallback = Callable[[str, float, float], None]
"""Called with the stage, the share of the work done, and the estimated seconds left."""

_FEWEST_TESTED = 10


def _ignore(*_: object) -> None:
    """Take what is reported, and do nothing."""


@dataclass(frozen=True)
class Advice:
    """What to do: prints as its sentences."""

    method: str
    """The method to use, by its name in `fedkeep.config.methods.METHODS`."""
    sentences: tuple[str, ...]
    files: tuple[Path, ...]
    """A page with the figures, an experiment that confirms the advice, and configurations."""
    complete: bool
    """Whether the trial came to its end."""

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def advise(
    data: str | Path,
    *,
    bytes: int | None = None,  # noqa: A002 - the word of the command line
    capacity: int = 10,
    participation: float = 0.1,
    minutes: float = 4.0,
    shuffled: bool = False,
    drift: float = 0.0,
    device: str = "device",
    label: str = "label",
    time: str | None = None,
    devices: int | None = None,
    model: str = "softmax",
    target: Literal["class", "number"] | None = None,
    jobs: int | None = None,
    backend: Backend = "local",
    out: Path | str | None = None,
    on_progress: ProgressCallback = _ignore,
    on_start: Callable[[str], None] = _ignore,
) -> Advice:
    """Say which method to use on data like the user's, by trying all of them.

    Parameters
    ----------
    data : str or Path
        A .csv, .parquet or .npz file, or `module:function`.
    bytes : int, optional
        The whole store of a device, to the byte, as in an agent's `store.budget`; it includes the
        model, the gist and all metadata.
    capacity : int
        Or the store in samples.
    participation : float
        The share of devices that takes part in a round.
    minutes : float
        The time limit.
    shuffled : bool
        The order of the rows is not time: samples arrive in random order.
    drift : float
        Strength of a simulated label shift, 0 to 1.
    device, label, time : str
        The columns of the device, the label and the time.
    devices : int, optional
        Divide the samples among so many devices, if the data names none.
    model : str
        `softmax`, `mlp`, or `module:factory`.
    target : {"class", "number"}, optional
        Whether the label is a class, or a number to predict; by default as the data shows it.
    jobs : int, optional
        Runs at a time; by default one a processor.
    backend : {"local", "ray"}
        Where runs are played.
    out : Path or str, optional
        Where everything goes; by default `advice/NAME`.
    on_progress : callable
        Called with the stage, the share of the work done, and the estimated seconds left.
    on_start : callable
        Called once, with a sentence on the data and on what is tried.

    Raises
    ------
    ConfigError
        If an option is not valid, or the bytes hold no sample.
    FedkeepError
        If the time was over before any run had ended.
    """
    source = _checked(data, bytes, minutes, devices, jobs, backend)
    folder = folder_for_records(folder_of(source) if out is None else out)
    columns = {"device": device, "label": label, "time": time}
    task = _task_of(source, columns, devices, {"model": model, "target": target})
    experiment = resolve({"task": task, "policy": {"name": "fifo"}})
    federation = load_data(experiment.task, experiment.seed)
    _check_tested(source, len(federation.test.indices))
    profile = DatasetProfile(federation)
    # Two vectors of the model's length: the gist, and the mean of what arrived since.
    gist_bytes = 2 * 4 * build_learner(experiment, federation).gradient_size
    capacities = {} if bytes is None else capacities_within(bytes, federation)
    settings = TrialSettings(
        task,
        capacities.get(FIFO, capacity),
        participation,
        100,
        {"shuffle": shuffled, "drift": drift},
        capacities=capacities,
        budget=bytes,
    )
    resolve(settings.table(FIFO, 0))  # an invalid option is named before anything is measured
    on_start(f"{describe(profile)} Trying the methods with {settings.capacity} of them a device.")
    at_a_time = jobs or os.cpu_count() or 1
    trial = Trial(
        settings, folder, 60 * minutes, at_a_time, on_progress, backend, digest_of(source)
    )
    complete = trial.run()
    if not trial.finals:
        raise FedkeepError(
            f"stopped before any run had ended: the same call goes on from there ({folder}), with "
            "more minutes it gets further"
        )
    found = [*sentences(trial, profile, gist_bytes, shuffled=shuffled, complete=complete)]
    if bytes is not None:
        found.append(f"By the rule for bytes, {spend_on_device(bytes, federation).reason}.")
    method = trial.recommended()
    first_seed = max(max(runs) for runs in trial.finals.values()) + 1
    files = trial.settings.write_files(folder, method, federation, first_seed)
    page = _write_page(folder, f"Advice on {Path(source).name}", found)
    return Advice(method, tuple(found), (*files, page), complete)


def _task_of(
    source: str,
    columns: dict[str, str | None],
    devices: int | None,
    options: dict[str, str | None],
) -> Table:
    """Return the task that reads the data; what is None is left to the task."""
    given = {name: value for name, value in (columns | options).items() if value is not None}
    place = "source" if ":" in source else "path"
    task: Table = {"name": "custom", place: source, "test_fraction": 0.2, **given}
    if devices is not None:
        task["partition"] = {"name": "dirichlet", "devices": devices, "alpha": 0.3}
    return task


def _check_tested(source: str, tested: int) -> None:
    if tested < _FEWEST_TESTED:
        raise DataError(
            f"{source} leaves {tested} samples for testing, too few to tell methods apart: "
            f"give at least {_FEWEST_TESTED * 5} samples"
        )


def _write_page(folder: Path, title: str, found: Sequence[str]) -> Path:
    """Write the advice as text, and as a page with the figures of the finished runs."""
    runs = [run for run in read_runs(folder / "runs") if run.end is not None]
    page = folder / "advice.html"
    page.write_text(html(runs, compare(runs), title, found), encoding="utf-8")
    (folder / "advice.txt").write_text("\n".join([*found, ""]), encoding="utf-8")
    return page


def _checked(
    data: object,
    size: object,
    minutes: object,
    devices: object,
    jobs: object,
    backend: object,
) -> str:
    """Return where the data is; arguments that no table of an experiment checks are checked."""
    if not isinstance(data, str | Path):
        raise ConfigError(
            "advise takes the path of a .csv, .parquet or .npz file, or 'module:function', got "
            f"{type(data).__name__}: save arrays with np.savez, or call fedkeep.compare"
        )
    check_number("minutes", minutes)
    for name, value, least in (("bytes", size, 0), ("devices", devices, 2), ("jobs", jobs, 1)):
        if value is not None:
            check_whole(name, value, least=least)
    if backend not in get_args(Backend):
        raise ConfigError(f"backend takes local or ray, got {backend!r}")
    return str(data)


def digest_of(data: str) -> str:
    """Return the SHA-256 of a data file; empty for a function."""
    if ":" in data:
        return ""
    with Path(data).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_of(data: str) -> Path:
    """Return where the advice on a file or function goes by default."""
    return Path("advice") / Path(data.partition(":")[0]).stem
