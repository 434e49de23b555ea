"""The accuracy that each epsilon costs on two tasks, and the figure of docs/privacy.md.

    FEDKEEP_DATA=... python experiments/privacy/accuracy.py run TASK [--seeds 5]
    python experiments/privacy/accuracy.py draw

TASK is synthetic or har; `draw` needs the extra `plot`. Runs are added to accuracy-TASK.json beside
this file; what is there already is not run again.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.config.experiment import resolve
from fedkeep.data.federation import Federation
from fedkeep.sim.engine import Simulator

HERE = Path(__file__).parent
EPSILONS = (0.5, 1.0, 2.0, 8.0, 32.0)
# clip: about the median norm of a sample's gradient.
# planned_participations: half as many again as a device takes part on average.
TASKS: dict[str, dict[str, Any]] = {
    "synthetic": {
        "task": {"name": "synthetic", "smallest": 400, "largest": 600},
        "train": {"rounds": 300, "participation": 0.05, "learning_rate": 0.02, "epochs": 5},
        "privacy": {"clip": 8.0, "planned_participations": 23},
    },
    "har": {
        "task": {"name": "har"},
        "model": {"last_layers": 1},
        "train": {"rounds": 200, "participation": 0.1, "learning_rate": 0.01, "epochs": 5},
        "privacy": {"clip": 3.0, "planned_participations": 30},
    },
}
TITLES = {
    "synthetic": "Synthetic, 200 devices, softmax regression (610 parameters)",
    "har": "Activity windows, 46 devices, last layer of 900-100-5 (505 of 90,605)",
}
CURVES: dict[str, dict[str, Any]] = {
    "estimator, per sample": {"unit": "sample"},
    "estimator, per device": {"unit": "device"},
    "estimator and model, per device": {
        "unit": "device",
        "protect": ["estimator", "model"],
        "model_clip": 0.5,
    },
}
ODE: dict[str, Any] = {"policy": {"name": "ode"}}
COLOURS = ("#2471a3", "#e08e0b", "#c0392b")


def cells(seeds: int) -> Iterator[tuple[str, float | None, int, dict[str, Any]]]:
    """Name, epsilon, seed and what differs, for every run of a task."""
    for seed in range(seeds):
        yield "no noise", None, seed, ODE
        yield "no estimator (reservoir)", None, seed, {"policy": {"name": "reservoir"}}
        for name, options in CURVES.items():
            for epsilon in EPSILONS:
                yield name, epsilon, seed, {**ODE, "privacy": {"epsilon": epsilon, **options}}


def run(task: str, seeds: int) -> None:
    path = HERE / f"accuracy-{task}.json"
    done: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    known = {(r["curve"], r["epsilon"], r["seed"]) for r in done}
    data: dict[int, Federation] = {}
    for name, epsilon, seed, differs in cells(seeds):
        if (name, epsilon, seed) in known:
            continue
        privacy = {**TASKS[task]["privacy"], **differs.get("privacy", {})}
        experiment = resolve(
            {**TASKS[task], **differs, "privacy": privacy, "seed": seed, "record": {"every": 10}}
        )
        if seed not in data:
            data = {seed: experiment.task.load(seed)}
        evaluated = [
            r.evaluation
            for r in Simulator(experiment, data[seed]).run()
            if r.evaluation is not None
        ]
        accuracy = float(np.mean([e.accuracy for e in evaluated[-3:]]))
        done.append(
            {"curve": name, "epsilon": epsilon, "seed": seed, "accuracy": round(accuracy, 5)}
        )
        path.write_text(json.dumps(done, indent=0) + "\n")


def draw(path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        2, 2, figsize=(10, 4.6), sharex="col", height_ratios=[2, 1], layout="constrained"
    )
    for (upper, lower), task in zip(panels.T, TASKS, strict=True):
        runs = json.loads((HERE / f"accuracy-{task}.json").read_text())
        for name, style in (("no noise", "-"), ("no estimator (reservoir)", ":")):
            level = np.mean([r["accuracy"] for r in runs if r["curve"] == name])
            upper.axhline(level, ls=style, color="k", label=name)
        for name, colour in zip(CURVES, COLOURS, strict=True):
            axes = lower if "model" in name else upper
            own = [
                [r["accuracy"] for r in runs if (r["curve"], r["epsilon"]) == (name, e)]
                for e in EPSILONS
            ]
            axes.plot(EPSILONS, [np.mean(a) for a in own], "o-", ms=4, color=colour, label=name)
            axes.fill_between(
                EPSILONS, [min(a) for a in own], [max(a) for a in own], color=colour, alpha=0.15
            )
        upper.set_title(TITLES[task], fontsize=9)
        upper.set(ylabel="accuracy", ylim=(0.8, 0.88))
        lower.set(ylabel="accuracy", ylim=(0, 0.45), xscale="log", xlabel="epsilon (delta = 1e-5)")
        lower.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        for axes in (upper, lower):
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8, loc="upper right")
    panels[1, 0].legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["run", "draw"])
    parser.add_argument("task", nargs="?", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/privacy-accuracy.png"))
    options = parser.parse_args()
    if options.action == "draw":
        draw(options.figure)
    else:
        for task in [options.task] if options.task else TASKS:
            run(task, options.seeds)


if __name__ == "__main__":
    main()
