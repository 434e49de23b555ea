"""Why ODE is ahead in the paper's own setting: longer steps, or better ones?

Every method runs at the printed learning rate and at multiples of it. A run keeps its accuracy and
the path that the global model has travelled by then (the sum of all updates' lengths).
So methods can be compared at the same rate, at the same path, and each at its best.

An arm `METHOD-stream-length` keeps the direction of each participant's update and gives it the
length that steps along the gradient of the device's own stream would have: what is left of a lead
there does not come from longer steps.

    python experiments/steps.py            IC; goes on where it stopped
    python experiments/steps.py --quick    two rounds of each, into runs/quick
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from lab.results import write_figures
from lab.step_lengths import STREAM_LENGTH

from fedkeep.config.experiment import Experiment, expand, override, read_experiment
from fedkeep.core.seeds import generator
from fedkeep.core.types import FloatArray, IntArray, Vector
from fedkeep.sim.baselines import Baseline, Reports
from fedkeep.sim.engine import Simulator

HERE = Path(__file__).parent
METHODS = ("fifo", "ode-est-participants", "ode-est", "default")
MULTIPLES = (1.0, 1.3, 2.0, 5.0)
SCALED = ("fifo", "ode-est-participants", "default")
"""Methods that run with steps of the stream's length too."""
SCALED_MULTIPLES = (1.0, 2.0)
SEEDS = (7, 8, 9)
"""Others than those of Table 2, whose result this explains."""
STREAM_SAMPLES = 50
"""Of a device's training samples, for the length of its stream's gradient."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rounds of each run")
    parser.add_argument("--tasks", nargs="*", default=["ic"], help="rows of Table 2")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--rounds", type=int, help="fewer than the row of Table 2 has")
    parser.add_argument("--multiples", nargs="*", type=float, default=list(MULTIPLES))
    parser.add_argument("--out", type=Path, help="results/, or with --quick runs/quick")
    options = parser.parse_args()
    out = options.out or (Path("runs/quick") if options.quick else HERE / "results")
    path = out / "steps.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    known = {(run["method"], run["config_hash"]) for run in runs}
    rounds = 2 if options.quick else options.rounds
    for task, seed, (arm, multiple) in itertools.product(options.tasks, options.seeds, arms()):
        experiment = setting(task, arm, multiple, seed, rounds)
        if multiple not in options.multiples or (arm, experiment.digest()) in known:
            continue
        run = {"task": task, "method": arm, "multiple": multiple, **travelled(arm, experiment)}
        runs.append(run)
        write_figures("steps", out, {"runs": runs})
        last = f"{run['accuracy'][-1]:.1%} after a path of {run['path'][-1]:.2f}"
        print(f"{task} {arm}, {multiple} x rate, seed {seed}: {last}", flush=True)


def arms() -> list[tuple[str, float]]:
    """What runs, and at which multiple of the printed rate; the most telling first."""
    plain = [(method, multiple) for multiple in MULTIPLES for method in METHODS]
    scaled = [(method + STREAM_LENGTH, m) for m in SCALED_MULTIPLES for method in SCALED]
    return [*plain[: len(METHODS)], *scaled, *plain[len(METHODS) :]]


class StreamLength(Baseline):
    """Merges updates of the participants' directions, each as long as its stream's would be.

    A local step along the mean gradient of a device's own samples is that gradient times the
    rate; it is taken over the same few samples for every method.
    """

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self._simulator = simulator

    def step(self, before: Vector, after: Vector, reports: Reports, rate: float) -> Vector:
        """Give the weighted mean of the rescaled updates, added to the model before."""
        total = sum(report.weight for report in reports.values())
        if not total:
            return after
        probe = self._simulator.parts.learner.probe(before)
        merged: FloatArray = before.astype(np.float64)
        for device, report in reports.items():
            update = report.model.astype(np.float64) - before
            length = float(np.linalg.norm(update))
            if length > 0:
                stream = probe.measure(self._simulator.parts.data.take(self._samples(device)))
                target = rate * report.steps * float(np.linalg.norm(stream.mean_gradient()))
                merged += report.weight / total * (target / length) * update
        return merged.astype(np.float32)

    def _samples(self, device: int) -> IntArray:
        own = self._simulator.parts.data.train.of(device)
        rng = generator(device, "stream-length")
        return np.sort(rng.choice(own, min(STREAM_SAMPLES, len(own)), replace=False))


def setting(task: str, arm: str, multiple: float, seed: int, rounds: int | None) -> Experiment:
    """What an arm runs: a row of Table 2 at a multiple of its rate."""
    table = read_experiment(HERE / "table2" / f"{task}.toml")
    settings = [f"train.learning_rate={multiple * table['train']['learning_rate']!r}"]
    if rounds is not None:
        settings += [f"train.rounds={rounds}", f"record.every={min(rounds, 40) // 2}"]
    table = override(table, settings)
    table["sweep"] = {"seed": [seed]}
    method = arm.removesuffix(STREAM_LENGTH)
    (experiment,) = [cell.experiment for cell in expand(table) if cell.experiment.label == method]
    return experiment


def travelled(arm: str, experiment: Experiment) -> dict[str, Any]:
    """One run: its accuracy, and the path of the global model, at every evaluation."""
    simulator = Simulator(experiment)
    if arm.endswith(STREAM_LENGTH):
        simulator.parts.baseline = StreamLength(simulator)
    rounds: list[int] = []
    accuracies: list[float] = []
    paths: list[float] = []
    path, before = 0.0, simulator.server.model.copy()
    for record in simulator.run():
        path += float(np.linalg.norm(simulator.server.model - before))
        before = simulator.server.model.copy()
        if record.evaluation is not None:
            rounds.append(record.round)
            accuracies.append(round(record.evaluation.accuracy, 5))
            paths.append(round(path, 4))
    return {
        "rate": experiment.train.learning_rate,
        "seed": experiment.seed,
        "config_hash": experiment.digest(),
        "rounds": rounds,
        "accuracy": accuracies,
        "path": paths,
    }


if __name__ == "__main__":
    main()
