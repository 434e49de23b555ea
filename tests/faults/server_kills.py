"""`kill -9` of a server at random points: it resumes from its state and ends with the same bits.

`python -m tests.faults.server_kills DIRECTORY KILLS [--secure]` forks servers that play rounds of a
small fleet, whose devices keep files, without a SuperLink; it kills each at a random moment and
prints what came of it. With `--secure` the rounds are secure sums, and servers and devices die in
the middle of them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fedkeep.flower.state_store import StateStore
from tests.flower.small_fleet import SmallFleet

ROUNDS, SECURE_ROUNDS = 30, 10
SECURE = {"privacy": {"secure_aggregation": True}}


@dataclass
class Tally:
    """What a series of kills brought."""

    kills: int = 0
    runs: int = 0
    lost: int = 0
    """Rounds that were acknowledged and then gone."""
    unsaid: int = 0
    """Servers that died between saving a round and saying so."""
    identical: int = 0
    """Runs that ended with the model of a run that was never killed."""


@dataclass(frozen=True)
class Run:
    """What is played: a run in the clear, or by secure sums."""

    secure: bool

    @property
    def rounds(self) -> int:
        return SECURE_ROUNDS if self.secure else ROUNDS

    def fleet(self, directory: Path | None = None) -> SmallFleet:
        table = SECURE if self.secure else {}
        return SmallFleet(devices=4, rounds=self.rounds, directory=directory, table=table)


def try_kills(directory: Path, kills: int, *, secure: bool = False) -> Tally:
    """Has a fresh process do the killing, since this one may not be fit to fork."""
    command = [sys.executable, "-m", "tests.faults.server_kills", str(directory), str(kills)]
    command += ["--secure"] if secure else []
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return Tally(**json.loads(done.stdout.splitlines()[-1]))


def _main(directory: Path, kills: int, run: Run) -> Tally:
    tally, rng = Tally(), np.random.default_rng(0)
    expected, began = _reference(run), time.monotonic()
    list(_server(directory / "whole", None, run))
    longest = (
        time.monotonic() - began
    ) / 3  # a server lives for a third of a run at most, however fast the machine
    while tally.kills < kills:
        home = directory / f"run-{tally.runs}"
        _play_under_fire(home, kills, tally, rng, run, longest)
        tally.runs += 1
        tally.identical += np.load(home / "model.npy").tobytes() == expected.tobytes()
    return tally


def _play_under_fire(
    home: Path, kills: int, tally: Tally, rng: np.random.Generator, run: Run, longest: float
) -> None:
    """One run to its end, its server killed again and again on the way."""
    saved = 0
    while not (home / "model.npy").exists():
        shots = kills - tally.kills
        events = list(_server(home, float(rng.uniform(0.0, longest)) if shots > 0 else None, run))
        resumed = next((number for word, number in events if word == "resumed"), saved)
        tally.lost += max(0, saved - resumed)
        tally.unsaid += resumed > saved
        saved = max([resumed, *(number for word, number in events if word == "saved")])
        tally.kills += shots > 0


def _server(home: Path, seconds: float | None, run: Run) -> Iterator[tuple[str, int]]:
    """Forks a server, kills it after some time if one is given, and returns its output."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _serve(home, write, run)
        os._exit(0)
    os.close(write)
    if seconds is not None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with os.fdopen(read) as said:
        for line in said:
            word, number = line.split()
            yield word, int(number)
    os.waitpid(child, 0)


def _serve(home: Path, write: int, run: Run) -> None:
    """Plays the run from wherever its state is, and acknowledges each round once it is saved."""
    fleet = run.fleet(home / "devices")
    strategy = fleet.strategy(StateStore(str(home / "state.db"), "run"))
    strategy.resume()
    os.write(write, f"resumed {strategy.server.round}\n".encode())
    for _ in strategy.rounds(fleet.grid(), run.rounds):
        os.write(write, f"saved {strategy.server.round}\n".encode())
    np.save(home / "model.new.npy", strategy.server.model)
    (home / "model.new.npy").replace(home / "model.npy")


def _reference(run: Run) -> np.ndarray:
    fleet = run.fleet()
    strategy = fleet.strategy()
    list(strategy.rounds(fleet.grid(), run.rounds))
    return strategy.server.model


if __name__ == "__main__":
    print(
        json.dumps(
            asdict(_main(Path(sys.argv[1]), int(sys.argv[2]), Run(secure="--secure" in sys.argv)))
        )
    )
