"""All finished runs of the programmes, by the hash of their settings: one file a task in experiments/results/curves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedkeep.records.versions import versions
from lab.summaries import Curve, Summary, read_summary, write_summary


class Curves:
    """Runs that need not be made again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tasks: dict[str, dict[str, Curve]] = {}
        for path in sorted(directory.glob("*.json")):
            self._tasks[path.stem] = {curve.config_hash: curve for curve in read_summary(path).curves}

    def find(self, digest: str) -> Curve | None:
        """The run with these settings, if it was made."""
        return next((curves[digest] for curves in self._tasks.values() if digest in curves), None)

    def all(self) -> list[Curve]:
        return [curve for curves in self._tasks.values() for curve in curves.values()]

    def add(self, task: str, curve: Curve) -> None:
        """Takes a run in and writes its task's file at once: a kill costs the run under way and no other."""
        self._tasks.setdefault(task, {})[curve.config_hash] = curve
        self._write(task)

    def keep(self, wanted: Callable[[Curve], bool]) -> None:
        """Forgets all other runs: to be made again after a change that no setting tells, or no longer asked for."""
        for task, curves in self._tasks.items():
            kept = {digest: curve for digest, curve in curves.items() if wanted(curve)}
            if len(kept) < len(curves):
                self._tasks[task] = kept
                self._write(task)

    def _write(self, task: str) -> None:
        ordered = sorted(self._tasks[task].values(), key=lambda c: (c.method, c.setting, c.planned, c.seed))
        summary = Summary(
            experiment=f"curves/{task}",
            about="Runs of the programmes, each with the hash of its settings.",
            task=task,
            command="python experiments/reproduce.py arena",
            versions=versions(),
            curves=tuple(ordered),
        )
        write_summary(self._directory / f"{task}.json", summary)
