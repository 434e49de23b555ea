"""Runs as event files of TensorBoard, by tensorboardX (extra `tensorboard`)."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from fedkeep.core.errors import DataError, optional_import
from fedkeep.records.lines import Evaluation
from fedkeep.records.runs import Run
from fedkeep.records.tables import EXPORTED


def write_events(runs: Iterable[Run], directory: Path) -> list[Path]:
    """Write each run as a folder of event files, so that TensorBoard shows them as curves.

    The folder is TASK/SETTING/METHOD/seed-N, without a setting TASK/METHOD/seed-N. A scalar is
    called as the column of the CSV, recall per label `recall/LABEL`; its step is the round, and
    its time the round too, so that the same runs give the same values.

    Parameters
    ----------
    runs : iterable of Run
        The runs.
    directory : Path
        Where the folders go; `tensorboard --logdir DIRECTORY` reads it.

    Returns
    -------
    list of Path
        The folder of each run.

    Raises
    ------
    MissingExtraError
        If tensorboardX is not installed.
    DataError
        If a folder holds event files already, or cannot be written.
    """
    with optional_import("TensorBoard event files", "tensorboard"):
        from tensorboardX import SummaryWriter
    folders = []
    for run in runs:
        head = run.header
        parts = (head.task, head.setting, head.method, f"seed-{head.seed}")
        folder = directory.joinpath(*(part.replace("/", "_") for part in parts if part))
        if any(folder.glob("events.out.tfevents.*")):
            raise DataError(f"{folder} holds event files already: name another directory")
        try:
            with SummaryWriter(logdir=str(folder)) as writer:
                for step, name, value in _scalars(run):
                    writer.add_scalar(name, value, step, walltime=step)
        except OSError as error:
            raise DataError(f"cannot write {folder}: {error.strerror}") from error
        folders.append(folder)
    return folders


def _scalars(run: Run) -> Iterator[tuple[int, str, float]]:
    """List the round, name and value of all that was measured; what is no number is left out."""
    for evaluation in run.evaluations:
        for name, value in _named(run, evaluation):
            if value is not None:
                yield evaluation.round, name, float(value)


def _named(run: Run, evaluation: Evaluation) -> Iterator[tuple[str, float | None]]:
    for name in EXPORTED:
        if name != "round":
            yield name, getattr(evaluation, name)
    for label, recall in zip(run.header.labels, evaluation.label_recall, strict=False):
        yield f"recall/{label}", recall
