"""Many runs in parallel processes, each pinned to its share of the machine's cores."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Literal

from fedkeep.sim.cluster import THREADS, play_on_ray
from fedkeep.sim.engine import Simulator
from fedkeep.sim.experiment import Cell
from fedkeep.sim.runner import is_finished, play

_TRIAL_SECONDS = 0.5
Step = tuple[int, int, float | None]
"""A run's progress: its place among the cells, the rounds done, and the accuracy where it was measured."""
Listener = Callable[[int, int, float | None], None]
"""Called with a step."""
Place = Literal["here", "ray"]
"""Where runs are played: in processes of this machine, or on a Ray cluster."""


def run_sweep(
    cells: Sequence[Cell], directory: Path, *, jobs: int, resume: bool, listen: Listener, on: Place = "here"
) -> None:
    """Plays every cell into the directory; what is finished already is left alone when resuming."""
    waiting = [i for i, cell in enumerate(cells) if not (resume and is_finished(cell, directory))]
    if on == "ray":
        directory.mkdir(parents=True, exist_ok=True)
        play_on_ray(cells, waiting, directory, listen)
        return
    if jobs == 1 or len(waiting) <= 1:
        for i in waiting:
            play(cells[i], directory, resume=resume, progress=partial(listen, i))
        return
    with _pinned(max(1, (os.cpu_count() or 1) // jobs)):
        _run_in_processes(cells, waiting, directory, jobs=jobs, resume=resume, listen=listen)


def estimate_seconds(cells: Sequence[Cell], jobs: int) -> float:
    """How long the cells will take, from a short trial of each method."""
    per_round: dict[str, float] = {}
    total = 0.0
    for cell in cells:
        kind = f"{cell.experiment.label} {cell.setting}"
        if kind not in per_round:
            per_round[kind] = _trial(cell)
        total += per_round[kind] * cell.experiment.train.rounds
    return total / max(1, min(jobs, len(cells)))


def _trial(cell: Cell) -> float:
    """Seconds a round takes."""
    simulator = Simulator(cell.experiment)
    rounds = 0
    began = time.perf_counter()
    while time.perf_counter() - began < _TRIAL_SECONDS or rounds < 2:
        simulator.play_round(evaluated=False)
        rounds += 1
    taken = (time.perf_counter() - began) / rounds
    began = time.perf_counter()
    simulator.evaluate()
    return taken + (time.perf_counter() - began) / cell.experiment.record.every


def _run_in_processes(
    cells: Sequence[Cell], waiting: Sequence[int], directory: Path, *, jobs: int, resume: bool, listen: Listener
) -> None:
    context = multiprocessing.get_context("spawn")
    steps: SimpleQueue[Step] = context.SimpleQueue()
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_become_worker, initargs=(steps,))
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
    pool.shutdown()


_steps: SimpleQueue[Step] | None = None


def _become_worker(steps: SimpleQueue[Step]) -> None:
    """Leaves Ctrl-C to the parent, which stops its workers between two checkpoints; ends when the parent does."""
    global _steps  # noqa: PLW0603 - a pool's initializer has no other way to hand something to its tasks
    _steps = steps
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot stop its workers, and would leave them on the processors for hours."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _play_one(index: int, cell: Cell, directory: Path, resume: bool) -> None:
    steps = _steps

    def tell(round_: int, accuracy: float | None) -> None:
        if steps is not None and accuracy is not None:
            steps.put((index, round_, accuracy))

    play(cell, directory, resume=resume, progress=tell)


@contextmanager
def _pinned(threads: int) -> Iterator[None]:
    """Lets processes started within use this many threads; numerical libraries read it when they are loaded."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
