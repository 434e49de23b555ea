"""Runs of a sweep on the machines of a Ray cluster; the records come back to this one, the same to the byte."""

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedkeep.config import Table
from fedkeep.core.errors import FedkeepError, needing
from fedkeep.files import writing
from fedkeep.records import read_run
from fedkeep.sim.experiment import Cell
from fedkeep.sim.runner import play

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_AGAIN = 2
"""How often a run is begun anew elsewhere when the machine it was on is lost."""
_PATIENCE = 5.0
"""Seconds in which a cluster must take a connection."""


def play_on_ray(
    cells: Sequence[Cell], waiting: Sequence[int], directory: Path, came: Callable[[int, int, float | None], None]
) -> None:
    """Plays the waiting cells on the cluster, a processor each; every record is written as soon as it comes back."""
    ray = _connected()
    remote = ray.remote(num_cpus=1, max_retries=_AGAIN)(_play_elsewhere)
    going = {remote.remote(cells[i].table, cells[i].setting): i for i in waiting}
    try:
        while going:
            (done,), _ = ray.wait(list(going), num_returns=1)
            i = going.pop(done)
            evaluations = read_run(_keep(_answer(ray, done), directory)).evaluations
            came(i, cells[i].experiment.train.rounds, evaluations[-1].accuracy)
    finally:
        for unfinished in going:
            ray.cancel(unfinished, force=True)
        ray.shutdown()


def processors() -> int:
    """How many runs the cluster can play at a time."""
    ray = _connected()
    try:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))
    finally:
        ray.shutdown()


def _play_elsewhere(table: Table, setting: str) -> dict[str, bytes]:
    """One run, into a folder that is gone afterwards; its files by name."""
    with tempfile.TemporaryDirectory(prefix="fedkeep-") as folder:
        play(Cell(table, setting), Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).glob("*.jsonl")}


def _keep(files: dict[str, bytes], directory: Path) -> Path:
    """Writes a run's files, the record last and whole: what is there is finished."""
    record = min(files, key=len)
    for name in sorted(files, key=len, reverse=True):
        with writing(directory / name) as file:
            file.write(files[name])
    (directory / record).with_suffix(".checkpoint").unlink(missing_ok=True)
    return directory / record


def _answer(ray: Any, task: Any) -> dict[str, bytes]:
    try:
        files: dict[str, bytes] = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FedkeepError):
            raise error.cause from error
        raise FedkeepError(f"a run failed on the cluster: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise FedkeepError(f"the Ray cluster lost a run: {error}; go on with --resume") from error
    return files


def _connected() -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS, or to the one that runs on this machine."""
    with needing("--on ray", "cluster"):
        import ray
    address = os.environ.get("RAY_ADDRESS", "auto")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or Ray warns of what it will do some day
    try:
        _knock(address)
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": dict.fromkeys(THREADS, "1")},
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise FedkeepError(
            f"no Ray cluster ({reason}): start one with `ray start --head`, or set RAY_ADDRESS"
        ) from error
    return ray


def _knock(address: str) -> None:
    """Raises OSError where nobody listens: Ray itself would wait for minutes, and then end the process."""
    place = urlsplit(address if "//" in address else f"//{address}")
    if place.hostname and place.port:
        socket.create_connection((place.hostname, place.port), timeout=_PATIENCE).close()
