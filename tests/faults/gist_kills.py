"""An agent with a gist that runs until it is killed: `python -m tests.faults.gist_kills FOLDER`."""

import sys
from pathlib import Path

import numpy as np

from fedkeep.core.types import LocalTraining, TrainOrder
from tests.agent.builders import AssembledAgent, feed, make_agent

TABLES = {
    "policy": {"name": "balanced-reservoir"},
    "gist": {"mode": "local", "encoding": "int8"},
    "store": {"budget": 130_000},
}


def opened(folder: Path) -> AssembledAgent:
    return make_agent(folder, **TABLES)


def participations(assembly: AssembledAgent) -> tuple[int, int]:
    """How many the device remembers, and how many its gist does."""
    state = assembly.agent.device.snapshot()
    return int(state["counters"][1]) + 1, int(state["gist.changes"])


def main(folder: Path) -> None:
    assembly = opened(folder)
    round_, _ = participations(assembly)
    while True:
        feed(assembly.agent, 1000 * round_, 20)
        model = (
            np.random.default_rng(round_)
            .standard_normal(assembly.agent.device.learner.size)
            .astype(np.float32)
        )
        assembly.agent.participate(TrainOrder(round_, model, None, LocalTraining(0.1, 2)))
        round_ += 1
        print(round_, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
