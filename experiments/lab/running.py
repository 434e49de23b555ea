"""Runs what a programme wants and nobody has run yet, stage by stage, in parallel processes, until the time is up."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from fedkeep.core.errors import DataError
from fedkeep.records import read_run
from fedkeep.sim.runner import play
from fedkeep.sim.sweep import estimate_seconds
from lab.costs import bytes_at_rest
from lab.curves import Curve, Curves, curve_of
from lab.programme import PlannedRun, Programme


def run_programme(programme: Programme, curves: Curves, records: Path, *, jobs: int, minutes: float | None) -> None:
    """Runs the stages one after the other; tasks whose data is not here are named, and left out."""
    deadline = time.monotonic() + 60 * minutes if minutes is not None else None
    absent: set[str] = set()
    while waiting := next_runs(programme, curves, absent):
        print(f"{programme.name}: {len(waiting)} runs to do before the next step", flush=True)
        here = ((run, _play(run, records)) for run in waiting)
        for run, outcome in _played_in_processes(waiting, records, jobs) if jobs > 1 else here:
            if isinstance(outcome, str):
                absent.add(run.task)
                print(f"without {run.task}: {outcome}", flush=True)
                break
            curves.add(run.task, outcome)
            seconds = f"{outcome.seconds or 0:.0f} s"
            what = f"{outcome.method} {outcome.setting} seed {outcome.seed}"
            print(f"{run.task}: {what}: {outcome.final:.1f} %, {seconds}", flush=True)
            if deadline is not None and time.monotonic() > deadline:
                print("the time is up; the same command goes on from here", flush=True)
                return


def next_runs(programme: Programme, curves: Curves, absent: set[str]) -> list[PlannedRun]:
    """The runs of the first stage that lacks any, those on the same data side by side."""
    for stage in programme.stages:
        wanted = [run for run in programme.wanted(stage, curves) if run.task not in absent]
        waiting = {run.digest: run for run in wanted if curves.find(run.digest) is None}
        if waiting:
            return sorted(waiting.values(), key=lambda run: (stage.tasks.index(run.task), run.cell.experiment.seed))
    return []


def estimated(programme: Programme, curves: Curves) -> Iterator[str]:
    """Per stage and task the runs that are lacking, and the minutes of one core that they take, by a trial a method."""
    for number, stage in enumerate(programme.stages, start=1):
        lacking: dict[str, list[PlannedRun]] = {}
        for run in programme.wanted(stage, curves):
            if curves.find(run.digest) is None:
                lacking.setdefault(run.task, []).append(run)
        for task, runs in lacking.items():
            methods = Counter(run.cell.experiment.label for run in runs)
            first = {run.cell.experiment.label: run.cell for run in reversed(runs)}
            minutes = sum(estimate_seconds([first[method]], 1) * count for method, count in methods.items()) / 60
            yield f"stage {number}, {task}: {len(runs)} runs, {minutes:.1f} minutes of one core"


def _played_in_processes(
    runs: Sequence[PlannedRun], records: Path, jobs: int
) -> Iterator[tuple[PlannedRun, Curve | str]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    futures: dict[Future[Curve | str], PlannedRun] = {pool.submit(partial(_play, run, records)): run for run in runs}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _play(run: PlannedRun, records: Path) -> Curve | str:
    """The run's curve; where its data is not here, what to do about it."""
    try:
        curve = curve_of(read_run(play(run.cell, records / run.task, resume=True)))
        return replace(curve, bytes_at_rest=bytes_at_rest(run.cell.experiment))
    except DataError as error:
        return str(error)
