"""What it costs to value samples: ratios to a plain batched forward pass in the same run.

    python benchmarks/valuation.py --json FILE [--quick]

"head" is the value (Eq. 6) and the estimator (Eq. 7) over the last layer, "full" the same over all
layers, and "one by one" backpropagates each sample alone. One thread; repetitions are interleaved,
and medians of CPU time compared.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
import torch
from torch import nn

from fedkeep.core.protocols import FleetLearner
from fedkeep.core.types import Batch, Vector
from fedkeep.learn import torch_models
from fedkeep.learn.models import learner_for

TrainingJob = Callable[[], object]
BATCH_SIZES = (1, 32, 256)


@dataclass(frozen=True)
class Task:
    model: str
    factory: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int


def har_dnn() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(900, 100), nn.ReLU(), nn.Linear(100, 5))


TASKS = {
    "lenet": Task("lenet", torch_models.lenet, (1, 28, 28), 10),
    "har": Task("mlp", har_dnn, (900,), 5),
    "traffic": Task("traffic-cnn", torch_models.traffic_cnn, (3, 64), 20),
}


def forward_pass(task: Task, model: Vector, batch: Batch) -> TrainingJob:
    """The plain forward pass that everything is compared with."""
    module = task.factory().eval()
    nn.utils.vector_to_parameters(torch.from_numpy(model), module.parameters())
    x = torch.from_numpy(batch.x)

    def run() -> object:
        with torch.no_grad():
            return module(x)

    return run


def valuation(learner: FleetLearner, model: Vector, batch: Batch) -> TrainingJob:
    """Values and mean gradient of a batch under a model that the device already has."""
    probe = learner.probe(model)
    direction = learner.initial(1)[-learner.gradient_size :]

    def run() -> object:
        seen = probe.measure(batch)
        return seen.projections(direction), seen.mean_gradient()

    return run


def one_by_one(task: Task, model: Vector, batch: Batch) -> TrainingJob:
    """The same values and mean gradient, one sample after the other by backprop."""
    module = task.factory().eval()
    nn.utils.vector_to_parameters(torch.from_numpy(model), module.parameters())
    parameters = list(module.parameters())
    direction = torch.from_numpy(
        np.random.default_rng(1).normal(size=model.size).astype(np.float32)
    )
    x, y = torch.from_numpy(batch.x), torch.from_numpy(batch.y)

    def run() -> object:
        values, total = [], torch.zeros(model.size)
        for i in range(len(y)):
            loss = nn.functional.cross_entropy(module(x[i : i + 1]), y[i : i + 1])
            gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
            values.append(torch.dot(gradient, direction))
            total += gradient
        return torch.stack(values), total / len(y)

    return run


def interleaved(jobs: dict[str, TrainingJob], repetitions: int) -> dict[str, float]:
    """The median CPU seconds of each job, all run in turn so that other programs hardly count."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for _ in range(repetitions):
        for name, job in jobs.items():
            start = process_time()
            job()
            times[name].append(process_time() - start)
    return {name: median(taken) for name, taken in times.items()}


def measure(task: Task, n: int, repetitions: int) -> dict[str, float]:
    """Seconds of the forward pass, and the ratios to it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, *task.shape)).astype(np.float32)
    batch = Batch(x, rng.integers(0, task.classes, n), np.arange(n))
    learners = {
        "head": learner_for(task.model, task.shape, task.classes, last_layers=1),
        "full": learner_for(task.model, task.shape, task.classes),
    }
    model = learners["full"].initial(0)
    jobs = {"forward": forward_pass(task, model, batch)}
    jobs |= {name: valuation(learner, model, batch) for name, learner in learners.items()}
    seconds = interleaved(jobs, repetitions)
    slow = interleaved(
        {"forward": jobs["forward"], "one_by_one": one_by_one(task, model, batch)}, 3
    )
    ratios = {name: seconds[name] / seconds["forward"] for name in learners}
    return {
        "forward": seconds["forward"],
        **ratios,
        "one_by_one": slow["one_by_one"] / slow["forward"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the ratios")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    repetitions = 15 if options.quick else 60
    results: dict[str, float] = {}
    print(f"{'model':8} {'batch':>5} {'forward ms':>11} {'head':>7} {'full':>7} {'one by one':>11}")
    for name, task in TASKS.items():
        for n in BATCH_SIZES:
            row = measure(task, n, repetitions)
            head, full, slow = row["head"], row["full"], row["one_by_one"]
            print(
                f"{name:8} {n:5} {row['forward'] * 1e3:11.3f}"
                f" {head:6.2f}x {full:6.2f}x {slow:10.1f}x"
            )
        results |= {f"{name}_head_{n}": head, f"{name}_full_{n}": full, f"{name}_one_by_one": slow}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
