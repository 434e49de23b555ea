"""Table 3: memory and time that valuing a sample takes, every method in fresh processes."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedkeep.config.experiment import Experiment, read_experiment, resolve
from fedkeep.core.device import Device
from fedkeep.core.protocols import FleetLearner
from fedkeep.core.regions import LabelRegions, Regions
from fedkeep.core.types import Assignment, Batch
from fedkeep.core.velocity import KnownVelocity
from fedkeep.data import Federation, ModelSpec, Ownership
from fedkeep.sim.assembly import build_learner
from fedkeep.tables import Table

HERE = Path(__file__).parent
TASKS = ("ic", "har", "tc")
METHODS: dict[str, Table] = {
    "fifo": {"policy": {"name": "fifo"}},
    "high-loss": {"policy": {"name": "high-loss"}},
    "gradient-norm": {"policy": {"name": "gradient-norm"}},
    "ode-est": {"policy": {"name": "ode"}},
    "ode-simplified": {"policy": {"name": "ode"}, "model": {"last_layers": 1}},
}
_WARM_UP = 20
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
HOW = (
    "One thread of this machine's processor; medians over fresh processes; "
    "the model itself is not counted as memory."
)


def measure_here(task: str, method: str, file: Path) -> dict[str, float]:
    """The cost of one method, from a file with a few samples, in a fresh child process.

    So no data set weighs on its memory. `one_ms` are milliseconds a sample, valued one at a time
    (the median), `batched_ms` valued all at once. `extra_mb` is the process's peak while it values
    one at a time, above what it held with model and store in place. A loss needs no gradient, so
    `high-loss` is measured without one; arrival numbers and random draws need no model at all.
    """
    with np.load(file, allow_pickle=False) as arrays:
        x, y, labels, model = arrays["x"], arrays["y"], int(arrays["labels"]), str(arrays["model"])
        options = json.loads(str(arrays["options"]))
    everyone = Ownership(np.arange(len(y)), np.array([len(y)]))
    names = tuple(map(str, range(labels)))
    data = Federation(
        task, x, y, everyone, everyone, names, ModelSpec(model, options), rounds_per_pass=1
    )
    experiment = resolve(experiment_table(task, method))
    if method == "high-loss":
        experiment = replace(experiment, model={**experiment.model, "last_layers": 1})
    samples = Batch(x, y, np.arange(len(y)))
    device = _device(experiment, data, build_learner(experiment, data))
    before = _resident("VmRSS")
    _RESET.write_text("5")
    one = [_seconds(device, samples.take(slice(i, i + 1)), i) for i in range(len(samples))]
    extra = _resident("VmHWM") - before
    fresh = Batch(samples.x, samples.y, samples.ids + len(samples))
    batched = _seconds(device, fresh, len(samples)) / len(samples)
    return {
        "one_ms": 1e3 * float(np.median(one[_WARM_UP:])),
        "batched_ms": 1e3 * batched,
        "extra_mb": extra,
    }


def _device(experiment: Experiment, data: Federation, learner: FleetLearner) -> Device:
    """A device that has taken part once: with a model, a direction and its share of the plan."""
    coordinated = experiment.names["coordinator"] != "none"
    regions: Regions = LabelRegions(data.labels if coordinated else 1)
    capacity = int(experiment.storage.capacities(1, experiment.seed)[0])
    quotas = np.full(regions.count, max(1, capacity // regions.count), dtype=np.int64)
    device = Device(
        learner,
        experiment.policy,
        capacity=capacity,
        sample_shape=data.sample_shape,
        labels=data.labels,
        regions=regions,
        meter=KnownVelocity(np.ones(regions.count)),
    )
    direction = np.random.default_rng(0).normal(size=learner.gradient_size).astype(np.float32)
    if experiment.names["policy"] not in {"fifo", "reservoir"}:
        device.set_model(
            learner.initial(0), direction if experiment.policy.uses_direction else None
        )
    device.apply_plan(Assignment(quotas, np.ones(regions.count), 1.0))
    return device


def _seconds(device: Device, batch: Batch, now: float) -> float:
    began = time.perf_counter()
    device.observe(batch, now)
    return time.perf_counter() - began


def _resident(field: str) -> float:
    """A memory figure of this process, in megabytes, as Linux tells it."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def experiment_table(task: str, method: str) -> Table:
    table = read_experiment(HERE / "tasks" / f"{task}.toml")
    return {**table, "preset": "paper", **METHODS[method]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="the folder that table3.json goes to"
    )
    parser.add_argument(
        "--quick", action="store_true", help="TC alone, one process each, few samples"
    )
    parser.add_argument("--processes", type=int, default=5, help="fresh processes a method")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_here(options.child[0], options.child[1], Path(options.child[2]))))
        return
    from lab.results import write_figures  # not in the child: it would weigh on its memory

    processes, count = (1, 40) if options.quick else (options.processes, 300)
    tasks: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for task in ("tc",) if options.quick else TASKS:
            file = Path(folder) / f"{task}.npz"
            data = resolve(experiment_table(task, "fifo")).task.load(0)
            batch = data.take(
                np.random.default_rng(0).choice(data.train.indices, count, replace=False)
            )
            own = json.dumps(dict(data.model.options))
            np.savez(
                file, x=batch.x, y=batch.y, labels=data.labels, model=data.model.name, options=own
            )
            for method in METHODS:
                call = [sys.executable, __file__, "--child", task, method, str(file)]
                printed = [
                    subprocess.run(call, check=True, capture_output=True).stdout
                    for _ in range(processes)
                ]
                runs: list[dict[str, float]] = list(map(json.loads, printed))
                medians = {
                    key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]
                }
                tasks.setdefault(task, {})[method] = medians
                print(task, method, medians, flush=True)
    write_figures("table3", options.out, {"how": HOW, "processes": processes, "tasks": tasks})


if __name__ == "__main__":
    main()
