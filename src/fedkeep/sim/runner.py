"""Plays an experiment into its record: evaluations, checkpoints, and resuming where a run stopped."""

import hashlib
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.core.types import State
from fedkeep.files import writing
from fedkeep.records import End, Header, Recorder, Timing, read_run
from fedkeep.records.runs import begins_with_header, is_intact_until, versions
from fedkeep.sim.engine import RoundRecord, Simulator
from fedkeep.sim.experiment import Cell
from fedkeep.sim.observer import Observer, image_size

Progress = Callable[[int, float | None], None]
"""Called with the rounds done and, where it was measured, the accuracy."""


def record_path(cell: Cell, directory: Path) -> Path:
    return directory / f"{cell.name}.jsonl"


def is_finished(cell: Cell, directory: Path) -> bool:
    """Whether the directory holds the whole record of this very experiment."""
    path = record_path(cell, directory)
    if not path.exists():
        return False
    try:
        run = read_run(path)
    except DataError:
        return False
    return run.end is not None and run.header.config_hash == cell.experiment.digest()


def play(cell: Cell, directory: Path, *, resume: bool = False, progress: Progress | None = None) -> Path:
    """Runs a cell to its end and returns its record's path; with `resume`, from its last checkpoint.

    >>> import tempfile
    >>> from fedkeep.sim.experiment import expand
    >>> table = {"task": {"name": "embedded", "devices": 4}, "train": {"rounds": 2}, "policy": {"name": "fifo"}}
    >>> [cell] = expand(table)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = read_run(play(cell, Path(folder)))
    >>> run.header.method, run.end.round
    ('fifo', 2)
    """
    path = record_path(cell, directory)
    if resume and is_finished(cell, directory):
        return path
    directory.mkdir(parents=True, exist_ok=True)
    run = _Run(cell, path, resume=resume)
    try:
        for record in run.simulator.run():
            run.note(record)
            if progress is not None:
                progress(record.round, record.evaluation.accuracy if record.evaluation else None)
        run.finish()
    finally:
        run.recorder.close()
    return path


class _Run:
    """One cell being played; its checkpoints fall on evaluations, where the record owes nothing."""

    def __init__(self, cell: Cell, path: Path, *, resume: bool) -> None:
        self.cell = cell
        self.simulator = Simulator(cell.experiment)
        self._checkpoint = path.with_suffix(".checkpoint")
        self._saved = 0
        self._seconds = 0.0
        resumed = resume and begins_with_header(path) and self._restore(path)
        self.recorder = Recorder(path)
        self._observer = Observer(self.simulator)
        if resumed:
            self.recorder.truncate_after(self._saved)
        else:
            self.recorder.start(_header(cell, self.simulator))
            for line in self._observer.opening():
                self.recorder.write(line)
        self._began = time.perf_counter()

    def note(self, record: RoundRecord) -> None:
        """Takes a round into the record; saves the run's state when it is time."""
        self._observer.see(record)
        if record.evaluation is None:
            return
        for line in self._observer.lines(record.round, record.evaluation):
            self.recorder.write(line)
        self.recorder.write(Timing(round=record.round, seconds=self._elapsed()))
        self._observer.start_anew()
        if record.round - self._saved >= self.cell.experiment.record.checkpoint_every:
            self._save(record.round)

    def finish(self) -> None:
        digest = hashlib.sha256(self.simulator.server.model.tobytes()).hexdigest()
        self.recorder.write(End(round=self.simulator.server.round, digest=digest))
        self._checkpoint.unlink(missing_ok=True)

    def _restore(self, path: Path) -> bool:
        """Goes back to the last checkpoint; False if there is none of this experiment, or the record is damaged."""
        state = _saved_state(self._checkpoint)
        if state is None or str(state.pop("config_hash")) != self.cell.experiment.digest():
            return False
        seconds = float(state.pop("seconds"))
        self.simulator.restore(state)
        if not is_intact_until(path, self.simulator.server.round):
            self.simulator = Simulator(self.cell.experiment)
            return False
        self._seconds, self._saved = seconds, self.simulator.server.round
        return True

    def _save(self, round_: int) -> None:
        state = self.simulator.snapshot()
        state["config_hash"] = np.array(self.cell.experiment.digest())
        state["seconds"] = np.array(self._elapsed())
        self.recorder.sync()
        with writing(self._checkpoint) as file:
            np.savez(file, **{_member(name): array for name, array in state.items()})  # type: ignore[arg-type]
        self._saved = round_

    def _elapsed(self) -> float:
        return self._seconds + time.perf_counter() - self._began


def _saved_state(path: Path) -> State | None:
    """The state that a checkpoint holds; None if there is none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name.replace("|", "/"): array for name, array in arrays.items()}
    except FileNotFoundError:
        return None
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise DataError(f"the checkpoint {path} is damaged; delete it to start that run anew") from error


def _member(name: str) -> str:
    """Names in a zip file are paths: slashes would become folders."""
    return name.replace("/", "|")


def _header(cell: Cell, simulator: Simulator) -> Header:
    experiment, data = cell.experiment, simulator.parts.data
    return Header(
        run=cell.name,
        method=experiment.label,
        task=experiment.names["task"],
        seed=experiment.seed,
        config=experiment.resolved(),
        config_hash=experiment.digest(),
        versions=versions(),
        labels=data.label_names,
        devices=data.devices,
        rounds=experiment.train.rounds,
        setting=cell.setting,
        image=image_size(data.sample_shape),
    )
