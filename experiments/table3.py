"""Table 3: memory and time that valuing a sample takes, every method in fresh processes of its own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from lab.cost import measure_cost

from fedkeep.config import Table, read_experiment
from fedkeep.core.types import Batch
from fedkeep.data import Federation, ModelSpec, Ownership
from fedkeep.records.versions import versions
from fedkeep.sim.experiment import resolve

HERE = Path(__file__).parent
TASKS = ("ic", "har", "tc")
METHODS: dict[str, Table] = {
    "fifo": {"policy": {"name": "fifo"}},
    "high-loss": {"policy": {"name": "high-loss"}},
    "gradient-norm": {"policy": {"name": "gradient-norm"}},
    "ode-est": {"policy": {"name": "ode"}},
    "ode-simplified": {"policy": {"name": "ode"}, "model": {"last_layers": 1}},
}
HOW = "One thread of this machine's processor; medians over fresh processes; the model itself is not counted as memory."


def experiment_table(task: str, method: str) -> Table:
    table = read_experiment(HERE / "tasks" / f"{task}.toml")
    return {**table, "preset": "paper", **METHODS[method]}


def measure_here(task: str, method: str, file: Path) -> None:
    """The child's work: one method, from a file with a few samples, so that no data set weighs on its memory."""
    with np.load(file, allow_pickle=False) as arrays:
        x, y, labels, model = arrays["x"], arrays["y"], int(arrays["labels"]), str(arrays["model"])
        options = json.loads(str(arrays["options"]))
    everyone = Ownership(np.arange(len(y)), np.array([0, len(y)]))
    names = tuple(map(str, range(labels)))
    data = Federation(task, x, y, everyone, everyone, names, ModelSpec(model, options), rounds_per_pass=1)
    cost = measure_cost(resolve(experiment_table(task, method)), data, Batch(x, y, np.arange(len(y))))
    print(json.dumps(dataclasses.asdict(cost)))


def save_samples(task: str, count: int, file: Path) -> None:
    data = resolve(experiment_table(task, "fifo")).task.load(0)
    ids = np.random.default_rng(0).choice(data.train.indices, count, replace=False)
    batch = data.take(ids)
    options = json.dumps(dict(data.model.options))
    np.savez(file, x=batch.x, y=batch.y, labels=data.labels, model=data.model.name, options=options)


def measure_apart(task: str, method: str, file: Path) -> dict[str, float]:
    call = [sys.executable, __file__, "--child", task, method, str(file)]
    found: dict[str, float] = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder that table3.json goes to")
    parser.add_argument("--quick", action="store_true", help="TC alone, one process each, few samples")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes a method")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure_here(options.child[0], options.child[1], Path(options.child[2]))
        return
    processes, count = (1, 40) if options.quick else (options.processes, 300)
    tasks: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for task in ("tc",) if options.quick else TASKS:
            file = Path(folder) / f"{task}.npz"
            save_samples(task, count, file)
            for method in METHODS:
                runs = [measure_apart(task, method, file) for _ in range(processes)]
                medians = {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}
                tasks.setdefault(task, {})[method] = medians
                print(task, method, medians, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "experiments/table3.py", *sys.argv[1:]])
    figures = {"command": command, "versions": versions(), "how": HOW, "processes": processes, "tasks": tasks}
    (options.out / "table3.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
