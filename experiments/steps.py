"""Why ODE is ahead in the paper's own setting: longer steps, or better ones?

Every method runs at the printed learning rate and at multiples of it. A run keeps its accuracy and
the path that the global model has travelled by then (the sum of all updates' lengths).
So methods can be compared at the same rate, at the same path, and each at its best.

    python experiments/steps.py            IC; goes on where it stopped
    python experiments/steps.py --quick    two rounds of each, into runs/quick
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from lab.results import write_figures

from fedkeep.config.experiment import expand, override, read_experiment
from fedkeep.sim.engine import Simulator

HERE = Path(__file__).parent
METHODS = ("fifo", "ode-est-participants", "ode-est", "default")
MULTIPLES = (1.0, 1.3, 2.0, 5.0)
SEEDS = (7, 8, 9)
"""Others than those of Table 2, whose result this explains."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rounds of each run")
    parser.add_argument("--tasks", nargs="*", default=["ic"], help="rows of Table 2")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, help="results/, or with --quick runs/quick")
    options = parser.parse_args()
    out = options.out or (Path("runs/quick") if options.quick else HERE / "results")
    path = out / "steps.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    known = {(run["task"], run["method"], run["multiple"], run["seed"]) for run in runs}
    for task in options.tasks:
        for seed in options.seeds:
            for multiple in MULTIPLES:
                for method in METHODS:
                    if (task, method, multiple, seed) in known:
                        continue
                    run = travelled(task, method, multiple, seed, quick=options.quick)
                    runs.append(run)
                    write_figures("steps", out, {"runs": runs})
                    last = f"{run['accuracy'][-1]:.1%} after a path of {run['path'][-1]:.2f}"
                    print(f"{task} {method}, {multiple} x rate, seed {seed}: {last}", flush=True)


def travelled(task: str, method: str, multiple: float, seed: int, *, quick: bool) -> dict[str, Any]:
    """One run: its accuracy, and the path of the global model, at every evaluation."""
    table = read_experiment(HERE / "table2" / f"{task}.toml")
    rate = multiple * table["train"]["learning_rate"]
    settings = [f"train.learning_rate={rate!r}"]
    settings += ["train.rounds=2", "record.every=1"] if quick else []
    table = override(table, settings)
    table["sweep"] = {"seed": [seed]}
    (experiment,) = [cell.experiment for cell in expand(table) if cell.experiment.label == method]
    simulator = Simulator(experiment)
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
        "task": task,
        "method": method,
        "multiple": multiple,
        "rate": rate,
        "seed": seed,
        "config_hash": experiment.digest(),
        "rounds": rounds,
        "accuracy": accuracies,
        "path": paths,
    }


if __name__ == "__main__":
    main()
