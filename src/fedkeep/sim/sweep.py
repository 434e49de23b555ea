"""Many runs in parallel: in processes of this machine, or on a Ray cluster.

Each process uses its share of the cores. From a cluster the records come back to this machine, the
same to the byte.
"""

import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from fedkeep.config.experiment import RunSpec
from fedkeep.core.errors import FedkeepError, optional_import
from fedkeep.files import atomic_write
from fedkeep.records import read_run
from fedkeep.records.runs import plan_runs
from fedkeep.sim.engine import Simulator
from fedkeep.sim.runner import is_finished, play, record_path
from fedkeep.tables import Table

_TRIAL_SECONDS = 0.5
_START_SECONDS = 2.0
"""Until worker processes have loaded what they need."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
Listener = Callable[[int, int, float | None], None]
"""Called with a run's index, the rounds done, and the accuracy where it was measured."""
Backend = Literal["local", "ray"]


def run_sweep(
    cells: Sequence[RunSpec],
    directory: Path,
    *,
    jobs: int,
    resume: bool,
    listen: Listener,
    backend: Backend = "local",
) -> None:
    """Execute every run into the directory; finished ones are left alone when resuming."""
    waiting = [i for i, cell in enumerate(cells) if not (resume and is_finished(cell, directory))]
    plan_runs(directory, (cell.name for cell in cells))
    if backend == "ray":
        directory.mkdir(parents=True, exist_ok=True)
        play_on_ray(cells, waiting, directory, listen)
    elif jobs == 1 or len(waiting) <= 1:
        for i in waiting:
            play(cells[i], directory, resume=resume, progress=partial(listen, i))
    else:
        with _without_main():
            _run_in_processes(cells, waiting, directory, jobs=jobs, resume=resume, listen=listen)


@np.errstate(over="ignore", invalid="ignore")  # the run's record tells that it diverges
def estimate_seconds(cells: Sequence[RunSpec], jobs: int) -> float:
    """Estimate how long the runs will take, from a short trial of each method."""
    kinds = {(cell.experiment.label, cell.setting): cell for cell in reversed(cells)}
    per_round = {}
    for kind, cell in kinds.items():
        simulator = Simulator(cell.experiment)
        simulator.play_round(evaluated=False)  # the first round is slower than those that follow
        spent: list[float] = []
        while sum(spent) < _TRIAL_SECONDS or len(spent) < 2:
            began = time.perf_counter()
            simulator.play_round(evaluated=False)
            spent.append(time.perf_counter() - began)
        played = time.perf_counter()
        simulator.evaluate()
        evaluating = (time.perf_counter() - played) / cell.experiment.record.every
        per_round[kind] = statistics.median(spent) + evaluating
    total = sum(
        per_round[cell.experiment.label, cell.setting] * cell.experiment.train.rounds
        for cell in cells
    )
    at_a_time = max(1, min(jobs, len(cells), os.cpu_count() or 1))
    return total / at_a_time + (_START_SECONDS if at_a_time > 1 else 0.0)


def _run_in_processes(
    cells: Sequence[RunSpec],
    waiting: Sequence[int],
    directory: Path,
    *,
    jobs: int,
    resume: bool,
    listen: Listener,
) -> None:
    """Execute runs in processes; numerical libraries read their number of threads at import."""
    before = {name: os.environ[name] for name in _THREADS if name in os.environ}
    os.environ.update(dict.fromkeys(_THREADS, str(max(1, (os.cpu_count() or 1) // jobs))))
    context = multiprocessing.get_context("spawn")
    steps = context.SimpleQueue()
    pool = ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_become_worker, initargs=(steps,)
    )
    try:
        going = {pool.submit(_play_one, i, cells[i], directory, resume) for i in waiting}
        while going:
            done, going = wait(going, timeout=0.1)
            while not steps.empty():
                listen(*steps.get())
            for future in done:
                future.result()  # a run that failed ends it all
    except BaseException:
        for process in (pool._processes or {}).values():
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        for name in _THREADS:
            del os.environ[name]
        os.environ.update(before)
    pool.shutdown()


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep worker processes from running the caller's script again: they need nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_steps: SimpleQueue[Any] | None = None


def _become_worker(steps: SimpleQueue[Any]) -> None:
    """Ignore Ctrl-C, as the parent stops its workers between checkpoints; end with the parent.

    A killed parent cannot stop its workers, and would leave them on the processors for hours.
    """
    global _steps  # noqa: PLW0603 - a pool's initializer has no other way to hand something to its tasks
    _steps = steps
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _play_one(index: int, cell: RunSpec, directory: Path, resume: bool) -> None:
    def tell(round_: int, accuracy: float | None) -> None:
        if _steps is not None and accuracy is not None:
            _steps.put((index, round_, accuracy))

    play(cell, directory, resume=resume, progress=tell)


def play_on_ray(
    cells: Sequence[RunSpec], waiting: Sequence[int], directory: Path, listen: Listener
) -> None:
    """Execute the waiting runs on the cluster, a processor each; write records as they arrive."""
    ray = _connected()
    # A run whose machine is lost is begun anew elsewhere, twice at most.
    remote = ray.remote(num_cpus=1, max_retries=2)(_play_elsewhere)
    going = {remote.remote(cells[i].table, cells[i].setting): i for i in waiting}
    try:
        while going:
            (done,), _ = ray.wait(list(going), num_returns=1)
            i = going.pop(done)
            record = record_path(cells[i], directory)
            try:
                files: dict[str, bytes] = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, FedkeepError):
                    raise error.cause from error
                raise FedkeepError(f"a run failed on the cluster: {error.cause!r}") from error
            except ray.exceptions.RayError as error:
                raise FedkeepError(
                    f"the Ray cluster lost a run: {error}; go on with --resume"
                ) from error
            for name, content in files.items():
                with atomic_write(directory / name) as file:
                    file.write(content)
            record.with_suffix(".checkpoint").unlink(missing_ok=True)
            listen(i, cells[i].experiment.train.rounds, read_run(record).evaluations[-1].accuracy)
    finally:
        for unfinished in going:
            ray.cancel(unfinished, force=True)
        ray.shutdown()


def processors() -> int:
    """Return how many runs the cluster can execute at a time."""
    ray = _connected()
    try:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))
    finally:
        ray.shutdown()


def _play_elsewhere(table: Table, setting: str) -> dict[str, bytes]:
    """Execute one run in a temporary folder and return its files by name, the record last.

    A run whose record exists counts as finished, so the record must be written last.
    """
    with tempfile.TemporaryDirectory(prefix="fedkeep-") as folder:
        record = play(RunSpec(table, setting), Path(folder))
        paths = sorted(Path(folder).glob("*.jsonl"), key=lambda path: path == record)
        return {path.name: path.read_bytes() for path in paths}


def _connected() -> Any:
    """Connect Ray to the cluster of RAY_ADDRESS, or to the one that runs on this machine.

    The address is tried first: else Ray itself would wait for minutes, and then end the process.
    """
    with optional_import("--backend ray", "cluster"):
        import ray
    address = os.environ.get("RAY_ADDRESS", "auto")
    # Or Ray warns of what it will do some day.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    threads = {"env_vars": dict.fromkeys(_THREADS, "1")}
    try:
        place = urlsplit(address if "//" in address else f"//{address}")
        if place.hostname and place.port:
            socket.create_connection((place.hostname, place.port), timeout=5.0).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=threads)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise FedkeepError(
            f"no Ray cluster ({reason}): start one with `ray start --head`, or set RAY_ADDRESS"
        ) from error
    return ray
