"""What noise on a shared gist costs in accuracy, kept whole and as a sketch.

    python experiments/privacy/sketch.py [--seeds 3]

The demo's fleet with a dense net; noise hides a whole device, and only the gist is protected. The
clip is about the median length of what is sent without noise, of each form by itself: the numbers
of a sketch of rank r are about sqrt(3 r + 1) times as long as the gradient. Runs are added to
accuracy-sketch.json beside this file; what is there already is not run again.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.config.experiment import resolve
from fedkeep.sim.engine import Simulator

HERE = Path(__file__).parent
PATH = HERE / "accuracy-sketch.json"
EPSILONS = (None, 100.0, 30.0, 10.0)
FORMS: dict[str, dict[str, Any]] = {
    "whole": {"gist": {"mode": "shared"}, "clip": 2.4},
    "rank 16, int8": {"gist": {"mode": "shared", "rank": 16, "encoding": "int8"}, "clip": 12.0},
    "rank 4, int8": {"gist": {"mode": "shared", "rank": 4, "encoding": "int8"}, "clip": 10.6},
    "local, nothing sent": {"gist": {"mode": "local"}, "clip": 1.0},
}
TASK: dict[str, Any] = {
    "task": {"name": "demo", "devices": 60},
    "model": {"name": "mlp", "hidden": [100]},
    "policy": {"name": "balanced-reservoir"},
    "storage": {"capacity": 5},
    "train": {"rounds": 100, "participation": 0.2, "learning_rate": 0.05, "epochs": 5},
    "aggregation": {"name": "fedavg"},
    "record": {"every": 5},
}
PARTICIPATIONS = 30
"""Planned for each device: half as many again as it takes part on average."""


def cells(seeds: int) -> Iterator[tuple[str, float | None, int]]:
    """Form, epsilon and seed of every run; without a shared gist noise changes nothing."""
    for seed in range(seeds):
        for form in FORMS:
            for epsilon in EPSILONS if "local" not in form else EPSILONS[:1]:
                yield form, epsilon, seed


def played(form: str, epsilon: float | None, seed: int) -> float:
    """Return the mean accuracy of the last five of twenty evaluations."""
    options = FORMS[form]
    table = {**TASK, "gist": options["gist"], "seed": seed}
    if epsilon is not None:
        table["privacy"] = {
            "epsilon": epsilon,
            "unit": "device",
            "protect": ["estimator"],
            "clip": options["clip"],
            "planned_participations": PARTICIPATIONS,
        }
    found = [r.evaluation for r in Simulator(resolve(table)).run() if r.evaluation is not None]
    return float(np.mean([evaluation.accuracy for evaluation in found[-5:]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    done: list[dict[str, Any]] = json.loads(PATH.read_text()) if PATH.exists() else []
    known = {(run["form"], run["epsilon"], run["seed"]) for run in done}
    for form, epsilon, seed in cells(options.seeds):
        if (form, epsilon, seed) in known:
            continue
        accuracy = round(played(form, epsilon, seed), 5)
        done.append({"form": form, "epsilon": epsilon, "seed": seed, "accuracy": accuracy})
        PATH.write_text(json.dumps(done, indent=0) + "\n")
    for form in FORMS:
        for epsilon in EPSILONS:
            runs = [r["accuracy"] for r in done if (r["form"], r["epsilon"]) == (form, epsilon)]
            if runs:
                shown = "no noise" if epsilon is None else f"epsilon {epsilon:g}"
                print(f"{form:22}{shown:14}{100 * np.mean(runs):6.1f}  ({len(runs)} seeds)")


if __name__ == "__main__":
    main()
