"""A suite of runs in one file: tasks, methods, and the stages that run them in order.

What a suite wants and has no result yet is run, stage by stage, in parallel processes, until the
time is up.
"""

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec

from fedkeep.config.experiment import RunSpec, read_experiment
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.records import read_run
from fedkeep.sim.runner import play
from fedkeep.sim.sweep import Backend, estimate_seconds, run_sweep
from fedkeep.tables import Table, build, merged, put, read_toml
from lab.curves import Curve, Curves, bytes_at_rest, curve_of

EVALUATIONS = 20
"""How often a run is evaluated, whatever its length."""
FARTHER = 10.0
"""Times the task's rate: tried too where the largest of a suite's rates wins."""
TRIAL_ROUNDS = 300
"""At most, of a run that finds a method's own rate; a shorter task is run to its end."""


@dataclass(frozen=True)
class Stage:
    """A product of tasks, methods, rates and settings."""

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    rates: Literal["shared", "own", "each"] = "shared"
    """`shared`: the task's rate; `own`: each method's own; `each`: all of the suite's."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of an experiment, each with the values that it takes: all combinations are run."""


class Contest(NamedTuple):
    """One method on one task in one setting: what a table has a line for."""

    task: str
    method: str
    setting: tuple[tuple[str, Any], ...] = ()

    @property
    def setting_name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.setting)


class PlannedRun(NamedTuple):
    """A run, and the task of the suite that it belongs to."""

    task: str
    cell: RunSpec

    @property
    def digest(self) -> str:
        return self.cell.experiment.digest()


@dataclass(frozen=True, eq=False)
class Suite:
    name: str
    tasks: dict[str, Table]
    methods: dict[str, Table]
    stages: tuple[Stage, ...]
    note: str = ""
    """What a reader of its table should know."""
    rates: tuple[float, ...] = (1 / 3, 1.0, 3.0)
    """Times the task's rate; a method's own rate has the largest area under the curve.

    It is found on seeds that are used for nothing else.
    """
    trial_seeds: tuple[int, ...] = (100, 101)

    def only(self, tasks: Sequence[str], methods: Sequence[str]) -> Self:
        """The part of it on these tasks with these methods; all of them where none are named."""
        stages = []
        for stage in self.stages:
            on = tuple(name for name in stage.tasks if name in (tasks or stage.tasks))
            by = tuple(name for name in stage.methods if name in (methods or stage.methods))
            stages.append(replace(stage, tasks=on, methods=by))
        return replace(self, stages=tuple(stages))

    def tiny(self, smaller: Mapping[str, Table], *, everywhere: bool) -> Self:
        """Two rounds of one seed: all methods on a stage's first task.

        With `everywhere`, the first method runs on all other tasks too.
        """
        tasks = {
            name: merged(
                table, {"task": smaller.get(str(table["task"]["name"]), {}), "train": {"rounds": 2}}
            )
            for name, table in self.tasks.items()
        }
        stages: list[Stage] = []
        for stage in self.stages:
            settings = {key: values[:1] for key, values in stage.settings.items()}
            first = replace(stage, seeds=stage.seeds[:1], settings=settings, tasks=stage.tasks[:1])
            others = stage.tasks[1:] if everywhere else ()
            stages += [first, replace(first, tasks=others, methods=stage.methods[:1])]
        rates, seeds = self.rates[:1], self.trial_seeds[:1]
        return replace(self, tasks=tasks, stages=tuple(stages), rates=rates, trial_seeds=seeds)

    def rows(self, stage: Stage) -> Iterator[Contest]:
        for task in stage.tasks:
            for values in itertools.product(*stage.settings.values()):
                for method in stage.methods:
                    yield Contest(task, method, tuple(zip(stage.settings, values, strict=True)))

    def wanted(self, stage: Stage, curves: Curves) -> Iterator[PlannedRun]:
        """The runs of a stage, as far as they are known; own rates must have been found first."""
        for row in self.rows(stage):
            if stage.rates == "own":
                yield from self.choosing(row, curves)
                if (own := self.own_rate(row, curves)) is not None:
                    yield from self.reported(row, own, stage.seeds)
            else:
                for rate in (1.0,) if stage.rates == "shared" else self.rates:
                    yield from self.reported(row, rate, stage.seeds)

    def reported(self, row: Contest, rate: float, seeds: Sequence[int]) -> list[PlannedRun]:
        return [self._planned(row, rate, seed, None) for seed in seeds]

    def choosing(self, row: Contest, curves: Curves) -> list[PlannedRun]:
        """The runs that find the method's own rate; a farther rate only if the largest wins."""
        return [run for rate in self._rates(row, curves) for run in self._tried(row, rate)]

    def own_rate(self, row: Contest, curves: Curves) -> float | None:
        """Times the task's rate; None until it is found."""
        return self._best(row, self._rates(row, curves), curves)

    def _rates(self, row: Contest, curves: Curves) -> tuple[float, ...]:
        farther = self._best(row, self.rates, curves) == max(self.rates)
        return (*self.rates, FARTHER) if farther else self.rates

    def _best(self, row: Contest, rates: Sequence[float], curves: Curves) -> float | None:
        """The rate with the largest area under the curve: mean accuracy over evaluations."""
        areas = dict.fromkeys(rates, 0.0)
        for rate in rates:
            for run in self._tried(row, rate):
                if (curve := curves.find(run.digest)) is None:
                    return None
                trained = [e.accuracy or 0.0 for e in curve.evaluations if e.round > 0]
                areas[rate] += sum(trained) / max(1, len(trained))
        return max(areas, key=lambda rate: areas[rate])

    def _tried(self, row: Contest, rate: float) -> list[PlannedRun]:
        return [self._planned(row, rate, seed, TRIAL_ROUNDS) for seed in self.trial_seeds]

    @cache  # noqa: B019 - settings are resolved once; a program reads few suites
    def _planned(self, row: Contest, rate: float, seed: int, most_rounds: int | None) -> PlannedRun:
        table = merged(self.tasks[row.task], {"label": row.method, **self.methods[row.method]})
        for key, value in row.setting:
            put(table, key, value)
        rounds = min(int(table["train"]["rounds"]), most_rounds or sys.maxsize)
        table["seed"] = seed
        table["train"] |= {
            "rounds": rounds,
            "learning_rate": float(table["train"]["learning_rate"]) * rate,
        }
        table["record"] = {
            **table.get("record", {}),
            "every": max(1, rounds // EVALUATIONS),
            "devices": 0,
        }
        return PlannedRun(row.task, RunSpec(table, f"{row.setting_name} rate={rate:.3g}".strip()))


def read_suite(path: Path) -> Suite:
    """The suite in a file. `methods` and `tasks` may name other files; `base` is a task's base."""
    table = read_toml(path)
    if unknown := table.keys() - {"about", "note", "methods", "tasks", "stages"}:
        raise ConfigError(f"{path}: unknown key '{min(unknown)}'")
    common = read_experiment(path.parent / str(table["methods"]))
    methods = common.pop("methods")
    listed, tasks = table["tasks"], {}
    if isinstance(listed, str):
        listed = read_toml(path.parent / listed)["tasks"]
    for name, task in listed.items():
        base = read_experiment(path.parent / str(task.pop("base")))
        tasks[name] = merged(merged(base, task), common)
    stages = tuple(build(Stage, stage, f"{path.name}: stages") for stage in table["stages"])
    for stage in stages:
        for kind, named, known in (
            ("task", stage.tasks, tasks),
            ("method", stage.methods, methods),
        ):
            for name in (name for name in named if name not in known):
                raise ConfigError(
                    f"{path}: a stage names the {kind} '{name}', which the file does not have"
                )
    return Suite(path.stem, tasks, methods, stages, str(table.get("note", "")))


def run_suite(
    suite: Suite,
    curves: Curves,
    records: Path,
    *,
    jobs: int,
    minutes: float | None,
    backend: Backend = "local",
) -> None:
    """Runs the stages one after the other; tasks whose data is not here are named, and left out.

    Each finished run is a line: how many of its step are done, and how long the rest will take if
    it is like those so far.
    """
    deadline = time.monotonic() + 60 * minutes if minutes is not None else None
    absent: set[str] = set()
    while waiting := next_runs(suite, curves, absent):
        print(f"{suite.name}: {len(waiting)} runs to do before the next step", flush=True)
        began = time.monotonic()
        played = _played(waiting, records, jobs, backend)
        for done, (run, outcome) in enumerate(played, start=1):
            if isinstance(outcome, str):
                absent.add(run.task)
                print(f"without {run.task}: {outcome}", flush=True)
                break
            curves.add(run.task, outcome)
            left = (time.monotonic() - began) / done * (len(waiting) - done)
            what = f"{outcome.method} {outcome.setting} seed {outcome.seed}"
            print(
                f"[{done} of {len(waiting)}, {in_minutes(left)} left] {run.task}: {what}: "
                f"{outcome.final:.1f} %, {outcome.seconds or 0:.0f} s",
                flush=True,
            )
            if deadline is not None and time.monotonic() > deadline:
                print("the time is up; the same command goes on from here", flush=True)
                return


def in_minutes(seconds: float) -> str:
    """A time left, in words.

    >>> in_minutes(20), in_minutes(200), in_minutes(8000)
    ('20 s', '3 min', '2 h 13 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def next_runs(suite: Suite, curves: Curves, absent: set[str]) -> list[PlannedRun]:
    """The runs of the first stage that lacks any, those on the same data side by side."""
    for stage in suite.stages:
        wanted = [run for run in suite.wanted(stage, curves) if run.task not in absent]
        waiting = {run.digest: run for run in wanted if curves.find(run.digest) is None}
        if waiting:
            return sorted(
                waiting.values(),
                key=lambda run: (stage.tasks.index(run.task), run.cell.experiment.seed),
            )
    return []


def estimated(suite: Suite, curves: Curves) -> Iterator[str]:
    """Per stage and task the runs that are lacking, and the minutes of one core they take."""
    for number, stage in enumerate(suite.stages, start=1):
        lacking: dict[str, list[PlannedRun]] = {}
        for run in suite.wanted(stage, curves):
            if curves.find(run.digest) is None:
                lacking.setdefault(run.task, []).append(run)
        for task, runs in lacking.items():
            minutes = estimate_seconds([RunSpec(run.cell.table, "") for run in runs], jobs=1) / 60
            yield f"stage {number}, {task}: {len(runs)} runs, {minutes:.1f} minutes of one core"


def recount(suite: Suite, curves: Curves) -> int:
    """Count anew what devices keep in the runs that are there; gives how many counts changed.

    Runs that other suites share were counted as those were made, by the code of that day. Tasks
    whose data is not here stay as they are.
    """
    counts: dict[str, int] = {}
    seeds = sorted({seed for stage in suite.stages for seed in stage.seeds})
    for task in suite.tasks:
        rows = [row for stage in suite.stages for row in suite.rows(stage) if row.task == task]
        for row in dict.fromkeys(rows):
            planned = suite.reported(row, 1.0, seeds)
            made = [run for run in planned if curves.find(run.digest) is not None]
            if not made:
                continue
            try:
                count = bytes_at_rest(planned[0].cell.experiment)
            except DataError as error:
                print(f"without {task}: {error}", flush=True)
                break
            counts |= dict.fromkeys((run.digest for run in made), count)
    return curves.recount(counts)


def _played(
    runs: Sequence[PlannedRun], records: Path, jobs: int, backend: Backend
) -> Iterator[tuple[PlannedRun, Curve | str]]:
    if backend == "ray":
        yield from _played_on_ray(runs, records)
        return
    if jobs == 1:
        yield from ((run, _play(run, records)) for run in runs)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    futures = {pool.submit(_play, run, records): run for run in runs}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _played_on_ray(
    runs: Sequence[PlannedRun], records: Path
) -> Iterator[tuple[PlannedRun, Curve | str]]:
    """Play the runs of one task after the other on the cluster, and read their records here."""
    for task, group in itertools.groupby(runs, key=lambda run: run.task):
        own = list(group)
        try:
            run_sweep(
                [run.cell for run in own],
                records / task,
                jobs=1,
                resume=True,
                listen=lambda *_: None,
                backend="ray",
            )
        except DataError as error:
            yield own[0], str(error)
            continue
        yield from ((run, _play(run, records)) for run in own)


def _play(run: PlannedRun, records: Path) -> Curve | str:
    """The run's curve; where its data is not here, what to do about it."""
    try:
        curve = curve_of(read_run(play(run.cell, records / run.task, resume=True)))
        return msgspec.structs.replace(curve, bytes_at_rest=bytes_at_rest(run.cell.experiment))
    except DataError as error:
        return str(error)
