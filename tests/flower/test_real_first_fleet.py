"""`fedkeep fleet` as a new user types it: rounds on a page, kills survived, everything stopped."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from fedkeep.core.errors import DataError
from fedkeep.deploy.first_fleet import FirstFleet
from fedkeep.deploy.local_fleet import free_port
from fedkeep.records import Members, read_run
from tests.flower.real_fleet import wait_until

pytestmark = pytest.mark.real


def fedkeep(*words: object) -> str:
    command = [sys.executable, "-m", "fedkeep", "fleet", *map(str, words)]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout


def test_a_first_fleet_survives_what_it_is_told_to(tmp_path: Path) -> None:
    root, page = tmp_path / "f", free_port()
    fleet = FirstFleet(root)

    def round_() -> int:
        try:
            return max(
                (line.round for line in read_run(root / "records" / "fleet.jsonl").rounds),
                default=0,
            )
        except DataError:
            return 0

    def twin_is_beside_it() -> bool:
        with suppress(DataError):
            return len(read_run(root / "records" / "fifo.jsonl").evaluations) >= 1
        return False

    fedkeep("init", root, "--devices", 2)
    assert f"http://127.0.0.1:{page}" in fedkeep(
        "start", root, "--port", free_port(), "--page", page
    )
    try:
        wait_until(lambda: round_() >= 1, 240, "the first round")
        with urlopen(f"http://127.0.0.1:{page}/", timeout=60) as answer:
            assert b"fedkeep" in answer.read()
        os.kill(fleet.running()["superlink"], signal.SIGKILL)
        wait_until(lambda: fleet.services()["superlink"].restarts == 1, 120, "another SuperLink")
        assert "started again once; it was killed by signal 9" in fedkeep("status", root)
        killed = round_()
        wait_until(lambda: round_() >= killed + 1, 240, "a round behind the new SuperLink")
        before = fleet.running()
        for name in ("server", "agent-1"):
            os.kill(before[name], signal.SIGKILL)
        killed = round_()
        wait_until(lambda: round_() >= killed + 2, 240, "two more rounds")
        assert {name for name, pid in fleet.running().items() if before[name] != pid} >= {
            "server",
            "agent-1",
        }
        said = fedkeep("status", root)
        assert "accuracy" in said
        wait_until(twin_is_beside_it, 120, "a round of the FIFO twin")
    finally:
        assert fedkeep("stop", root) == "Stopped.\n"
    assert fleet.running() == {}
    run = read_run(root / "records" / "fleet.jsonl")
    rounds = [line.round for line in run.rounds]
    assert rounds == list(range(1, len(rounds) + 1)), "each round once"
    members = run.of(Members)[-1].members
    assert all(member.stored for member in members)
    assert all(member.capacity <= 20 for member in members), "a store that fills"
