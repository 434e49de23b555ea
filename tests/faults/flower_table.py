"""The long forms of the fault tests of the server and of Flower: `python -m tests.faults.flower_table`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.faults.dropouts import try_dropout
from tests.faults.server_kills import try_kills

SEEDS = range(5)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        tally = try_kills(Path(name), kills=200)
    print(f"kill -9 of the server, its state only: {tally.kills} kills over {tally.runs} runs")
    print(f"  rounds lost after their acknowledgement  {tally.lost}")
    print(f"  runs that ended with the same bits       {tally.identical} of {tally.runs}")
    print("replies lost   accuracy, mean of five seeds   stalled rounds")
    for share in (0.0, 0.1, 0.3, 0.5):
        runs = [try_dropout(share, seed, rounds=30) for seed in SEEDS]
        stalled = sum(30 - run.rounds for run in runs)
        print(
            f"  {share:4.0%}         {np.mean([run.accuracy for run in runs]):.3f}                          {stalled}"
        )
    print("kill -9 of devices behind a real SuperLink: 20", flush=True)
    environment = os.environ | {"FEDKEEP_ROUNDS": "65", "FEDKEEP_DEVICE_KILLS": "20"}
    devices = [sys.executable, "-m", "pytest", "-q", "tests/flower/test_real_agents.py"]
    return subprocess.run(devices, env=environment, check=False).returncode + (tally.lost > 0)


if __name__ == "__main__":
    sys.exit(main())
