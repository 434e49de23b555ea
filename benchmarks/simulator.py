"""How fast the simulator is: ratios within one run, in processor time, on one thread.

    python benchmarks/simulator.py --json FILE [--quick]

`overhead` compares rounds of the simulator with the bare tensor work they contain, recorded and
done again, under ODE; `overhead_gist_*` the same under a fresh draw with a gist.
`*_speedup` compare them with the same work done one sample at a time, each by a forward and a full
backward pass, as valuing by backprop does it whichever layers count. `*_mean_batch` is how many
samples a device then catches up on, after enough rounds for that to be steady. `flower_speedup`
compares the wall time of a round of the synthetic task with the same in Flower's simulation under a
lean loop, `flower_stock_speedup` under Flower's own. `fleet_*` compare a round of 100,000 devices,
and of a million, with one of 1,000 at the same number of participants. Evaluations, the same in
all, are left out of all but the overheads.

Rounds are played twice from one snapshot: timed, and then by a learner that notes its requests.
"""

import argparse
import json
import multiprocessing
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkeep.config.experiment import resolve
from fedkeep.core.errors import FedkeepError
from fedkeep.core.protocols import FleetLearner, PerSampleGradients, TrainingJob
from fedkeep.core.slices import of_kind
from fedkeep.core.types import Batch, LocalTraining, Scores, Vector
from fedkeep.data import Federation, ModelSpec, Ownership
from fedkeep.learn import torch_models
from fedkeep.sim.engine import Simulator

WARM_UP = 100
TASKS: dict[str, dict[str, Any]] = {
    "ic": {
        "task": {"name": "fashion-mnist"},
        "storage": {"capacity": 5},
        "train": {"participation": 0.1, "epochs": 2},
    },
    "har": {
        "task": {"name": "har"},
        "storage": {"capacity": 5},
        "train": {"participation": 0.065, "epochs": 5},
    },
    "st": {
        "task": {"name": "synthetic"},
        "storage": {"capacity": 10},
        "train": {"participation": 0.05, "epochs": 5},
    },
}


@dataclass
class Measured:
    """A batch under a model, and its requests: projections, a mean gradient, the gist's inputs."""

    model: Vector
    batch: Batch
    direction: Vector | None = None
    mean: bool = False
    weighted: list[Scores] = field(default_factory=list)
    """Weights by which gradients were added up."""
    likened: "list[Measured]" = field(default_factory=list)
    """The same samples under other models, whose gradients were multiplied with these."""
    norms: bool = False


@dataclass
class Work:
    """The tensor work of some rounds: what was measured and what was trained."""

    calls: list[list[Measured]] = field(default_factory=list)
    """What was measured in one call each."""
    trained: list[tuple[Vector, Sequence[TrainingJob], LocalTraining]] = field(default_factory=list)

    @property
    def measured(self) -> list[Measured]:
        return [each for call in self.calls for each in call]

    @property
    def mean_batch(self) -> float:
        """Samples a device catches up on; stored samples are measured without a mean gradient."""
        return float(np.mean([len(each.batch) for each in self.measured if each.mean]))


class Noted:
    """Measurements that note down what they are asked for."""

    def __init__(self, inner: PerSampleGradients, note: Measured) -> None:
        self._inner, self._note = inner, note

    def inner(self, other: PerSampleGradients) -> Scores:
        same = of_kind(Noted, other)
        self._note.likened.append(same._note)
        return self._inner.inner(same._inner)

    def norms(self) -> Scores:
        self._note.norms = True
        return self._inner.norms()

    def weighted_gradient(self, weights: Scores) -> Vector:
        self._note.weighted.append(weights)
        return self._inner.weighted_gradient(weights)

    def projections(self, direction: Vector) -> Scores:
        self._note.direction = direction
        return self._inner.projections(direction)

    def mean_gradient(self) -> Vector:
        self._note.mean = True
        return self._inner.mean_gradient()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class NotedProbe:
    def __init__(self, learner: "NotingLearner", model: Vector) -> None:
        self._learner, self._model = learner, model

    def measure(self, batch: Batch) -> Noted:
        return self._learner.measure_many([self._model], [batch])[0]


class NotingLearner:
    """A learner that keeps a list of the work it is given."""

    def __init__(self, inner: FleetLearner) -> None:
        self.inner, self.work = inner, Work()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def probe(self, model: Vector) -> NotedProbe:
        return NotedProbe(self, model)

    def measure_many(self, models: Sequence[Vector], batches: Sequence[Batch]) -> list[Noted]:
        notes = [Measured(model, batch) for model, batch in zip(models, batches, strict=True)]
        self.work.calls.append(notes)
        return [
            Noted(*each)
            for each in zip(self.inner.measure_many(models, batches), notes, strict=True)
        ]

    def train_many(self, *work: Any) -> list[Vector]:
        self.work.trained.append(work)
        return self.inner.train_many(*work)


def simulator_of(task: str, last_layers: int | None = None, policy: str = "ode") -> Simulator:
    table = TASKS[task] | {
        "policy": {"name": policy},
        "model": {"last_layers": last_layers} if last_layers else {},
    }
    simulator = Simulator(resolve(table))
    play(simulator, WARM_UP)
    return simulator


def play(simulator: Simulator, rounds: int) -> None:
    for _ in range(rounds):
        simulator.play_round(evaluated=False)


def played(simulator: Simulator, rounds: int) -> tuple[float, Work]:
    """The processor time of the next rounds, and the work they contain."""
    fleet, state = simulator.parts.fleet, simulator.snapshot()
    taken = seconds(lambda: play(simulator, rounds))
    simulator.restore(state)
    fleet.learner = noting = NotingLearner(simulator.parts.learner)  # type: ignore[union-attr]
    play(simulator, rounds)
    fleet.learner = simulator.parts.learner  # type: ignore[union-attr]
    return taken, noting.work


def seconds(job: Callable[[], object]) -> float:
    began = process_time()
    job()
    return process_time() - began


def bare(learner: FleetLearner, work: Work) -> None:
    """The work alone, in the same batches and calls."""
    known: dict[int, PerSampleGradients] = {}
    for call in work.calls:
        found = learner.measure_many([each.model for each in call], [each.batch for each in call])
        for each, measured in zip(call, found, strict=True):
            known[id(each)] = measured
            ask(each, measured, [known[id(other)] for other in each.likened])
    for round_ in work.trained:
        learner.train_many(*round_)


def ask(
    each: Measured, measured: PerSampleGradients, likened: Sequence[PerSampleGradients]
) -> None:
    """Asks for what was asked for."""
    if each.mean:
        measured.mean_gradient()
    if each.direction is not None:
        measured.projections(each.direction)
    for weights in each.weighted:
        measured.weighted_gradient(weights)
    for other in likened:
        measured.inner(other)
    if each.norms:
        measured.norms()


def one_by_one(factory: Callable[[], nn.Module], work: Work, valued: int) -> None:
    """The work one sample at a time: forward and backward pass for each, gradients as vectors."""
    module = factory()
    parameters = list(module.parameters())
    for each in work.measured:
        nn.utils.vector_to_parameters(torch.from_numpy(each.model), parameters)
        toward = None if each.direction is None else torch.from_numpy(each.direction)
        mean = torch.zeros(valued)
        for i in range(len(each.batch)):
            gradient = sample_gradient(module, parameters, each.batch, i)[-valued:]
            if each.mean:
                mean += (gradient - mean) / (i + 1)
            if toward is not None:
                torch.dot(gradient, toward)
    for start, jobs, local in work.trained:
        for job in jobs:
            train_one_by_one(module, parameters, start, job, local)


def train_one_by_one(
    module: nn.Module,
    parameters: list[nn.Parameter],
    start: Vector,
    job: TrainingJob,
    local: LocalTraining,
) -> None:
    flat = torch.from_numpy(start.copy())
    for _ in range(local.epochs):
        nn.utils.vector_to_parameters(flat, parameters)
        step = torch.zeros_like(flat)
        for i, weight in enumerate(job.weights.tolist()):
            step += weight * sample_gradient(module, parameters, job.batch, i)
        flat = flat - local.learning_rate / float(job.weights.sum()) * step


def sample_gradient(
    module: nn.Module, parameters: list[nn.Parameter], batch: Batch, i: int
) -> torch.Tensor:
    x, y = torch.from_numpy(batch.x[i : i + 1]), torch.from_numpy(batch.y[i : i + 1])
    loss = nn.functional.cross_entropy(module(x), y)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "ic": torch_models.lenet,
    "har": lambda: nn.Sequential(nn.Flatten(), nn.Linear(900, 100), nn.ReLU(), nn.Linear(100, 5)),
    "st": lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 10)),
}


def overhead(task: str, policy: str, rounds: int, repetitions: int) -> float:
    """Rounds of a task, evaluated every twenty, over their tensor work."""
    simulator = simulator_of(task, policy=policy)
    ratios = []
    for _ in range(repetitions):
        taken, work = played(simulator, rounds)
        evaluations = rounds / 20 * seconds(simulator.evaluate)
        tensors = seconds(lambda: bare(simulator.parts.learner, work))  # noqa: B023 - called here
        ratios.append((taken + evaluations) / (tensors + evaluations))
    return median(ratios)


def speedup(task: str, last_layers: int | None, rounds: int) -> tuple[float, float]:
    """One sample at a time over the simulator, and the mean catch-up batch, over all the rounds."""
    simulator = simulator_of(task, last_layers)
    taken, work = played(simulator, rounds)
    valued = simulator.parts.learner.gradient_size
    return seconds(lambda: one_by_one(FACTORIES[task], work, valued)) / taken, work.mean_batch


def flower_speedups(*, quick: bool) -> dict[str, float]:
    """A round in Flower's simulation over the simulator's, in wall time; empty without Flower."""
    try:
        import flower_job  # type: ignore[import-not-found] # beside this script
    except ImportError as error:
        print(f"flower_speedup: left out, {error}")
        return {}
    simulated = median(flower_job.simulated(100))
    lean = median(flower_job.flower(20 if quick else 50, stock=False))
    stock = median(flower_job.flower(3, stock=True))
    return {"flower_speedup": lean / simulated, "flower_stock_speedup": stock / simulated}


def large_fleet(devices: int) -> Federation:
    """Ten samples a device, twenty features, ten labels."""
    rng = np.random.default_rng(0)
    n = devices * 10
    x = rng.standard_normal((n, 20), dtype=np.float32)
    y = (x[:, :10] + 0.1 * rng.standard_normal((n, 10), dtype=np.float32)).argmax(axis=1)
    members = Ownership(np.arange(n), np.full(devices, 10))
    test = Ownership(np.arange(1000), np.array([1000] + [0] * (devices - 1)))
    names = tuple(map(str, range(10)))
    return Federation("large", x, y, members, test, names, ModelSpec("softmax"), rounds_per_pass=20)


def fleet_cost(arguments: tuple[int, int]) -> tuple[float, float]:
    """Processor seconds a round with twenty participants, and peak memory in GB (new process)."""
    devices, rounds = arguments
    table = {
        "task": {"name": "demo"},
        "policy": {"name": "ode"},
        "train": {"participation": 20 / devices},
    }
    simulator = Simulator(resolve(table), large_fleet(devices))
    for _ in range(10):
        simulator.play_round(evaluated=False)
    taken = [seconds(lambda: simulator.play_round(evaluated=False)) for _ in range(rounds)]
    return median(taken), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def fleets(rounds: int, *, quick: bool) -> dict[str, float]:
    sizes = {"1k": 1_000, "100k": 100_000} | ({} if quick else {"1m": 1_000_000})
    jobs = [(devices, rounds) for devices in sizes.values()]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        small, *large = pool.map(fleet_cost, jobs, chunksize=1)
    found = {}
    for name, (taken, peak) in zip(list(sizes)[1:], large, strict=True):
        found |= {f"fleet_{name}_over_1k": taken / small[0], f"fleet_{name}_peak_gb": peak}
    return found


def measure(*, quick: bool) -> dict[str, float]:
    rounds, repetitions = (20, 2) if quick else (100, 5)
    results = fleets(20 if quick else 100, quick=quick)
    jobs: list[tuple[str, str, int | None]] = [
        ("st_speedup", "st", None),
        ("har_speedup", "har", None),
        ("ic_full_speedup", "ic", None),
        ("ic_head_speedup", "ic", 1),
    ]
    for name, task, last_layers in jobs:
        try:
            results[name], results[f"{task}_mean_batch"] = speedup(task, last_layers, rounds)
            print(f"{name}: {results[name]:.1f}", flush=True)
        except FedkeepError as error:
            print(f"{name}: left out, {error}")
    if "ic_full_speedup" in results:
        results["overhead"] = overhead("ic", "ode", 20, repetitions)
        results["overhead_gist_ic"] = overhead("ic", "balanced-reservoir", 20, repetitions)
    results |= flower_speedups(quick=quick)
    return results


TARGETS = {
    "overhead": "<= 1.3",
    "overhead_gist_ic": "<= 1.3",
    "ic_full_speedup": ">= 5",
    "ic_head_speedup": ">= 15",
    "har_speedup": ">= 30",
    "st_speedup": ">= 100",
    "flower_speedup": ">= 5",
    "fleet_100k_over_1k": "<= 1.5",
    "fleet_100k_peak_gb": "< 4",
    "fleet_1m_over_1k": "",
    "fleet_1m_peak_gb": "< 4",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and repetitions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(quick=arguments.quick)
    for name, value in sorted(results.items()):
        print(f"{name:22} {value:10.2f}   {TARGETS.get(name, '')}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
