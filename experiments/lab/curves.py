"""All finished runs of the programmes, by the hash of their settings: one file a task in experiments/results/curves."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedkeep.records.versions import versions
from lab.summaries import Curve, ExperimentSummary, read_summary, write_summary


class Curves:
    """Runs that need not be made again; several processes may add to them at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tasks = {path.stem: _read(path) for path in sorted(directory.glob("*.json"))}

    def find(self, digest: str) -> Curve | None:
        """The run with these settings, if it was made."""
        return next((curves[digest] for curves in self._tasks.values() if digest in curves), None)

    def all(self) -> list[Curve]:
        return [curve for curves in self._tasks.values() for curve in curves.values()]

    def add(self, task: str, curve: Curve) -> None:
        """Takes a run in and writes its task's file at once: a kill costs the run under way and no other."""
        with self._alone():
            self._tasks[task] = _read(self._path(task)) | {curve.config_hash: curve}
            self._write(task)

    def keep(self, wanted: Callable[[Curve], bool]) -> None:
        """Forgets all other runs: to be made again after a change that no setting tells, or no longer asked for."""
        with self._alone():
            for task in self._tasks:
                before = _read(self._path(task))
                self._tasks[task] = {digest: curve for digest, curve in before.items() if wanted(curve)}
                if len(self._tasks[task]) < len(before):
                    self._write(task)

    def _path(self, task: str) -> Path:
        return self._directory / f"{task}.json"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds other processes back while a file is read and written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / ".lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield

    def _write(self, task: str) -> None:
        ordered = sorted(self._tasks[task].values(), key=lambda c: (c.method, c.setting, c.planned, c.seed))
        summary = ExperimentSummary(
            experiment=f"curves/{task}",
            about="Runs of the programmes, each with the hash of its settings.",
            task=task,
            command="python experiments/reproduce.py arena",
            versions=versions(),
            curves=tuple(ordered),
        )
        write_summary(self._path(task), summary)


def _read(path: Path) -> dict[str, Curve]:
    return {curve.config_hash: curve for curve in read_summary(path).curves} if path.exists() else {}
