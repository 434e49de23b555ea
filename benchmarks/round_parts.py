"""Where a round of the simulator spends its time, by part, in processor time and one process.

    python benchmarks/round_parts.py [--quick] [--tasks st har ic large] [--table FILE]

A part's time is its own: what it asks of another part is counted there. Measurements are made when
first asked for, so that their time is found within scoring and summing, and counted as `measure`.
The parts are those of `PARTS`; `rest` is everything else. `none` plays FIFO under FedAvg without
limits: what remains of a round when nothing that can be switched off is on.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import torch

from fedkeep.config.experiment import resolve
from fedkeep.core.aggregation.pipeline import UpdatePipeline
from fedkeep.core.device import Device
from fedkeep.core.gist import Gist
from fedkeep.core.participation import Participation
from fedkeep.core.selection import Selection
from fedkeep.core.server import Server
from fedkeep.core.store import MemoryStore
from fedkeep.data import Stream
from fedkeep.learn import backends
from fedkeep.learn.dense_learner import DenseLearner, DenseTrace
from fedkeep.sim.engine import Simulator
from fedkeep.sim.fleet import SimulatedFleet
from fedkeep.tables import merged

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.pages import write_between

WARM_UP = 60
PARTS: dict[str, list[tuple[type, str]]] = {
    "stream": [(Stream, "between"), (Stream, "rounds"), (Stream, "position")],
    "measure": [
        (backends.FrozenModel, "measure"),
        (backends.FactoredMeasurements, "weighted_gradient"),
        (backends.FactoredMeasurements, "projections"),
        (backends.FactoredMeasurements, "inner"),
        (backends.FactoredMeasurements, "head_norms"),
        (backends.ChunkedMeasurements, "weighted_gradient"),
        (backends.ChunkedMeasurements, "projections"),
        (backends.ChunkedMeasurements, "inner"),
        (DenseTrace, "__init__"),
    ],
    "score": [(Selection, "_score")],
    "offer": [(MemoryStore, "offer"), (MemoryStore, "configure")],
    "select": [(Selection, "offer"), (Selection, "divide"), (Device, "ingest")],
    "gist": [(Gist, "correct"), (Gist, "keep"), (Participation, "look_ahead")],
    "participate": [
        (Participation, "begin"),
        (Participation, "correct"),
        (Participation, "finish"),
    ],
    "train": [(DenseLearner, "train_many")],
    "orders": [(Server, "open_round")],
    "screen": [(Server, "receive")],
    "merge": [(UpdatePipeline, "merge"), (UpdatePipeline, "clip_gradients")],
    "close": [(Server, "close_round")],
    "devices": [(SimulatedFleet, "catch_up"), (SimulatedFleet, "take_part")],
}
TASKS: dict[str, dict[str, Any]] = {
    "st": {
        "task": {"name": "synthetic"},
        "storage": {"capacity": 10},
        "train": {"participation": 0.05, "epochs": 5},
    },
    "har": {
        "task": {"name": "har"},
        "storage": {"capacity": 5},
        "train": {"participation": 0.065, "epochs": 5},
    },
    "ic": {
        "task": {"name": "fashion-mnist"},
        "storage": {"capacity": 5},
        "train": {"participation": 0.1, "epochs": 2},
    },
    "large": {
        "task": {"name": "har"},
        "model": {"name": "mlp", "hidden": [1110]},
        "storage": {"capacity": 5},
        "train": {"participation": 0.065, "epochs": 5},
    },
}
"""`ic` is LeNet; `large` a dense net of a million parameters."""
METHODS: dict[str, dict[str, Any]] = {
    "none": {
        "policy": {"name": "fifo"},
        "aggregation": {"name": "fedavg"},
        "limits": {"enabled": False},
    },
    "fifo": {"policy": {"name": "fifo"}},
    "ode": {"policy": {"name": "ode"}},
    "default": {"policy": {"name": "balanced-reservoir"}},
}


class Parts:
    """Processor time by part, each without the parts that it called."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = process_time()

    def switch(self) -> None:
        """Give the time since the last switch to the part that runs."""
        now = process_time()
        self.seconds[self._running[-1] if self._running else "rest"] += now - self._since
        self._since = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self._running.pop()

        return run

    @contextmanager
    def watching(self, parts: Mapping[str, list[tuple[type, str]]]) -> Iterator[None]:
        """Time what is called within, and nothing before it."""
        with ExitStack() as stack:
            for part, functions in parts.items():
                for owner, name in functions:
                    timed = self.timed(part, vars(owner)[name])
                    stack.enter_context(patch.object(owner, name, timed))
            self._since = process_time()
            yield
            self.switch()


def learner_parts(simulator: Simulator) -> dict[str, list[tuple[type, str]]]:
    """The parts, with the class of the learner that trains and measures."""
    kind = type(simulator.parts.learner)
    parts = {part: [*functions] for part, functions in PARTS.items()}
    if kind is not DenseLearner:
        parts["train"] = [(c, "train_many") for c in kind.__mro__ if "train_many" in vars(c)][:1]
    parts["measure"] += [(c, "measure_many") for c in kind.__mro__ if "measure_many" in vars(c)][:1]
    return parts


def play(simulator: Simulator, rounds: int) -> None:
    for _ in range(rounds):
        simulator.play_round(evaluated=False)


def measure(task: str, method: str, rounds: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a round without timers, and by part with them, from one snapshot."""
    simulator = Simulator(resolve(merged(TASKS[task], METHODS[method])))
    play(simulator, WARM_UP if task != "large" else 5)
    state = simulator.snapshot()
    began = process_time()
    play(simulator, rounds)
    whole = process_time() - began
    simulator.restore(state)
    parts = Parts()
    with parts.watching(learner_parts(simulator)):
        play(simulator, rounds)
    found = {name: 1e3 * parts.seconds[name] / rounds for name in (*PARTS, "rest")}
    return 1e3 * whole / rounds, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--tasks", nargs="*", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--methods", nargs="*", default=[*METHODS], choices=[*METHODS])
    parser.add_argument("--table", type=Path, help="put the table into this page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [*PARTS, "rest"]
    lines = [
        f"| ms a round | | whole | {' | '.join(names)} |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for task in options.tasks:
        rounds = {"large": 5, "ic": 20}.get(task, 60) // (2 if options.quick else 1)
        for method in options.methods:
            whole, parts = measure(task, method, rounds)
            cells = " | ".join(f"{parts[name]:.2f}" for name in names)
            lines.append(f"| {task} | {method} | {whole:.1f} | {cells} |")
            print(lines[-1], flush=True)
    if options.table:
        write_between(options.table, "parts", "\n".join(lines))


if __name__ == "__main__":
    main()
