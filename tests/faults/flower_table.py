"""Runs the fault tests of server and Flower in long form: `python -m tests.faults.flower_table`."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.faults.dropouts import try_dropout
from tests.faults.server_kills import try_kills
from tests.faults.table import Row, write_page

OUT = Path("docs/faults-flower.md")
SEEDS, ROUNDS = range(5), 30


def server_kills(scale: float) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        tally = try_kills(Path(folder), kills=int(200 * scale))
    found = (
        f"{tally.kills} kills over {tally.runs} runs, {tally.lost} rounds lost, "
        f"{tally.identical} of {tally.runs} runs"
    )
    return (
        "`kill -9` of the server at random points, its state without a SuperLink",
        "no saved round lost, the same bits at the end",
        f"{found} with the same bits",
        not tally.lost and tally.identical == tally.runs,
    )


def served_kills(_scale: float) -> Row:
    what = (
        "`kill -9` of the ServerApp, then of `fedkeep serve` with its SuperLink, "
        "2 SuperNodes, TLS and keys"
    )
    passed, said = _pytest("tests/flower/test_real_resume.py")
    return (
        what,
        "resumes, the same bits at the end",
        f"2 kills, {'the same bits' if passed else said}",
        passed,
    )


def device_kills(scale: float) -> Row:
    kills = max(2, int(20 * scale))
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "found.json"
        limits = {"FEDKEEP_DEVICE_KILLS": str(kills), "FEDKEEP_FOUND": str(figures)}
        passed, said = _pytest("tests/flower/test_real_agents.py", **limits)
        found = json.loads(figures.read_text()) if figures.exists() else {}
    told = (
        f"{found['kills']} kills in {found['rounds']} rounds, "
        f"the longest {found['longest']:.0f} s of {found['deadline']:.0f}; "
        f"accuracy {found['accuracy']:.3f}, with a random store {found['random']:.3f}"
        if found
        else said
    )
    what = "`kill -9` of devices, agent and SuperNode, mid-round, behind a real SuperLink"
    return what, "rounds close; identity, store, estimator kept", told, passed


def bad_updates(_scale: float) -> Row:
    passed, said = _pytest("tests/faults/test_flower_bad_updates.py")
    what = "14 kinds of bad update on each of model, estimator and profile"
    return what, "the run goes on, the offender is named", said, passed


def dropouts(scale: float) -> Row:
    rounds, told, stalled = max(10, int(ROUNDS * scale)), [], 0
    for share in (0.0, 0.1, 0.3, 0.5):
        runs = [try_dropout(share, seed, rounds) for seed in SEEDS]
        stalled += sum(rounds - run.rounds for run in runs)
        told.append(f"{np.mean([run.accuracy for run in runs]):.3f}")
    what = f"0, 10, 30, 50 % of the replies lost, {rounds} rounds, {len(SEEDS)} seeds"
    return (
        what,
        "0 stalled rounds",
        f"accuracy {', '.join(told)}; {stalled} stalled rounds",
        not stalled,
    )


def _pytest(path: str, **environment: str) -> tuple[bool, str]:
    """Whether the tests of a file pass, and pytest's last line without the time."""
    command = [sys.executable, "-m", "pytest", "--quiet", "--color=no", path]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
    last = done.stdout.strip().splitlines()[-1]
    return done.returncode == 0, re.sub(r" in [0-9.]+s.*", "", last)


ROWS = (server_kills, served_kills, bad_updates, dropouts, device_kills)


def main() -> None:
    about = "Written by `python -m tests.faults.flower_table`; every row is a test that can fail."
    write_page(OUT, "A fleet on Flower under faults", about, [(row.__name__, row) for row in ROWS])


if __name__ == "__main__":
    main()
