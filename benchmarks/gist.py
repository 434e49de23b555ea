"""What a gist costs a device: ratios within one run, in processor time on one thread, and bytes.

    python benchmarks/gist.py --json FILE [--quick]

`participation_over_plain` is a participation of five epochs on 5 or 10 stored samples, with a local gist and without.
`arrival_*` are arrivals, 32 at a time, counted for the gist: measured, their mean gradient added to the window; over a
plain forward pass of the same samples in torch, and over ODE's value on all layers, which projects every gradient as
well. `wire_*` are the bytes of an order and its report as they are sent: with a local gist over the same store without
one, which is federated averaging, and with a shared gist over ODE. `bytes_*` is the gist at rest in each encoding;
`ram_*` the vectors that a device holds for it: the window's sum, the gist, and the model it was last sent (its anchor).

Jobs are run in turn and medians compared, so that neighbours on the machine hardly count.
"""

import argparse
import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
import torch
from valuation import Task, forward_pass, har_dnn, interleaved  # type: ignore[import-not-found] # beside this script

from fedkeep.core.device import Device
from fedkeep.core.estimators import GradientAccumulator
from fedkeep.core.gist import Encoding, GistOptions
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.protocols import FleetLearner
from fedkeep.core.store import AfterUse
from fedkeep.core.types import Batch, LocalTraining, TrainOrder, Vector
from fedkeep.learn import torch_models
from fedkeep.learn.models import learner_for
from fedkeep.protocol.messages import Participate, Reported
from fedkeep.protocol.wire import to_bytes

ARRIVALS = 32
LOCAL = LocalTraining(learning_rate=0.01, epochs=5)
NONE, LOCALLY, SHARED = GistOptions(), GistOptions("local"), GistOptions("shared")
ENCODINGS: tuple[Encoding, ...] = ("float32", "float16", "int8")


@dataclass(frozen=True)
class Stored:
    """A task, and how many samples its devices keep."""

    task: Task
    capacity: int


TASKS = {
    "softmax": Stored(
        Task(
            "softmax",
            lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 10)),
            (60,),
            10,
        ),
        10,
    ),
    "mlp": Stored(Task("mlp", har_dnn, (900,), 5), 5),
    "lenet": Stored(Task("lenet", torch_models.lenet, (1, 28, 28), 10), 5),
    "traffic-cnn": Stored(Task("traffic-cnn", torch_models.traffic_cnn, (3, 64), 20), 10),
}


class Bench:
    """One task's learner, two models that are a step apart, and a stream without end."""

    def __init__(self, stored: Stored) -> None:
        self.task, self.capacity = stored.task, stored.capacity
        self.learner: FleetLearner = learner_for(
            self.task.model, self.task.shape, self.task.classes
        )
        self._rng, self._ids = np.random.default_rng(0), count()
        first = self.learner.initial(0)
        self.models = [first, first + np.float32(0.01) * self.learner.initial(1)]

    def arrivals(self) -> Batch:
        x = self._rng.standard_normal((ARRIVALS, *self.task.shape), dtype=np.float32)
        ids = np.array([next(self._ids) for _ in range(ARRIVALS)])
        return Batch(x, self._rng.integers(0, self.task.classes, ARRIVALS), ids)

    def device(self, policy: SelectionPolicy, gist: GistOptions) -> Device:
        made = Device(
            self.learner,
            policy,
            capacity=self.capacity,
            sample_shape=self.task.shape,
            labels=self.task.classes,
            after_use=AfterUse("evict_trained_first"),
            gist=gist,
        )
        made.set_model(self.models[0])
        return made

    def order(self, round_: int, direction: Vector | None = None) -> TrainOrder:
        """An order whose model differs from the one of the round before."""
        return TrainOrder(round_, self.models[round_ % 2], direction, LOCAL, round_ - 1)


def participations(bench: Bench, repetitions: int) -> float:
    """A participation with a local gist over one without, each after a window of arrivals, which is not timed."""
    devices = [bench.device(BalancedReservoir(), gist) for gist in (LOCALLY, NONE)]
    taken: list[list[float]] = [[], []]
    for round_ in range(repetitions + 2):
        batch, order = bench.arrivals(), bench.order(round_)
        for device, times in zip(devices, taken, strict=True):
            device.observe(batch, float(round_))
            began = process_time()
            device.participate(order)
            times.append(process_time() - began)
    mended, plain = (median(times[2:]) for times in taken)
    return mended / plain


def arrivals(bench: Bench, repetitions: int) -> dict[str, float]:
    """Arrivals counted for a gist, over a forward pass and over ODE's value."""
    batch, model = bench.arrivals(), bench.models[0]
    probe, window = (
        bench.learner.probe(model),
        GradientAccumulator(bench.learner.gradient_size, bench.task.classes),
    )
    direction = bench.models[1][-bench.learner.gradient_size :]

    def counted() -> None:
        window.add(probe.measure(batch), batch.y)

    def valued() -> None:
        measured = probe.measure(batch)
        measured.projections(direction)
        window.add(measured, batch.y)

    jobs = {"forward": forward_pass(bench.task, model, batch), "ode": valued, "gist": counted}
    seconds = interleaved(jobs, repetitions)
    return {f"arrival_over_{name}": seconds["gist"] / seconds[name] for name in ("forward", "ode")}


def wire_bytes(bench: Bench, policy: SelectionPolicy, gist: GistOptions) -> int:
    """Bytes of an order and its report, after a first round gave the fleet whatever direction there is to send."""
    device, direction, sent = bench.device(policy, gist), None, 0
    for round_ in range(2):
        device.observe(bench.arrivals(), float(round_))
        order = bench.order(round_, direction)
        report = device.participate(order)
        direction, sent = (
            report.local_gradient,
            len(to_bytes(Participate(order))) + len(to_bytes(Reported(report))),
        )
    return sent


def wire(bench: Bench) -> dict[str, float]:
    averaging = wire_bytes(bench, BalancedReservoir(), NONE)
    return {
        "wire_local_over_fedavg": wire_bytes(bench, BalancedReservoir(), LOCALLY) / averaging,
        "wire_shared_over_ode": wire_bytes(bench, BalancedReservoir(), SHARED)
        / wire_bytes(bench, Ode(), NONE),
    }


def footprint(bench: Bench) -> dict[str, float]:
    """Bytes that a device has for its gist, as it snapshots them after two participations."""
    sizes = {}
    for encoding in ENCODINGS:
        device = bench.device(BalancedReservoir(), GistOptions("local", encoding=encoding))
        for round_ in range(2):
            device.observe(bench.arrivals(), float(round_))
            device.participate(bench.order(round_))
        state = device.snapshot()
        sizes[f"bytes_{encoding}"] = float(
            sum(array.nbytes for name, array in state.items() if name[:5] == "gist.")
        )
    ram = {
        "window": state["window.sum"].nbytes,
        "gist": sizes["bytes_float32"],
        "anchor": state["model"].nbytes,
    }
    return sizes | {f"ram_{name}": float(size) for name, size in ram.items()}


def measure(stored: Stored, repetitions: int) -> dict[str, float]:
    bench = Bench(stored)
    times = {
        "participation_over_plain": participations(bench, repetitions),
        **arrivals(bench, repetitions),
    }
    return times | wire(bench) | footprint(bench)


TARGETS = {
    "participation_over_plain": "<= 2",
    "arrival_over_ode": "<= 1",
    "wire_local_over_fedavg": "1.00",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures, by model")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        name: measure(stored, 10 if options.quick else 300) for name, stored in TASKS.items()
    }
    print(f"{'':24}" + "".join(f"{name:>12}" for name in results))
    for key in results["softmax"]:
        figures = "".join(
            f"{row[key]:12.2f}" if "over" in key else f"{row[key]:12,.0f}"
            for row in results.values()
        )
        print(f"{key:24}{figures}   {TARGETS.get(key, '')}".rstrip())
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
