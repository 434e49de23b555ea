"""What a gist costs a device: ratios within one run, in processor time on one thread, and bytes.

    python benchmarks/gist.py --json FILE [--quick]

`participation_over_plain` is a participation of five epochs on 5 or 10 stored samples, with a local
gist over one without. `arrival_*` are arrivals, 32 at a time, counted for the gist: measured, and
their mean gradient added to the window. They are compared with a plain forward pass of the same
samples in torch, and with ODE's value on all layers, which also projects every gradient. `wire_*`
are the bytes of an order and its report as they are sent: with a local gist over the same store
without one (federated averaging), and with a shared gist over ODE. `bytes_*` is the gist at rest in
each encoding, and `kept_*` with the window: `sketch` is of rank 16 in int8, `smallest` of rank 4 in
int4. `ram_*` counts the vectors that a device holds for it: the window's sum, the gist,
and the model it was last sent (its anchor).

Jobs are run in turn and medians compared, so that other programs on the machine hardly count.
"""

import argparse
import json
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
import torch
from valuation import Task, forward_pass, har_dnn, interleaved  # type: ignore[import-not-found] # beside this script

from fedkeep.core.device import Device
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
SKETCHED = GistOptions("local", rank="auto")
SMALLEST = GistOptions("local", rank=4, encoding="int4")
ENCODINGS: tuple[Encoding, ...] = ("float32", "float16", "int8", "int4")


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


def participations(bench: Bench, repetitions: int) -> dict[str, float]:
    """Time participations with a gist, whole and as a sketch, over one without.

    Each comes after a window of arrivals, which is not timed.
    """
    devices = [bench.device(BalancedReservoir(), gist) for gist in (LOCALLY, SKETCHED, NONE)]
    taken: list[list[float]] = [[], [], []]
    for round_ in range(repetitions + 2):
        batch, order = bench.arrivals(), bench.order(round_)
        for device, times in zip(devices, taken, strict=True):
            device.observe(batch, float(round_))
            began = process_time()
            device.participate(order)
            times.append(process_time() - began)
    whole, sketched, plain = (median(times[2:]) for times in taken)
    return {
        "participation_over_plain": whole / plain,
        "participation_sketch_over_plain": sketched / plain,
    }


def arrivals(bench: Bench, repetitions: int) -> dict[str, float]:
    """Arrivals counted for a gist, over a forward pass and over ODE's value."""
    batch, model = bench.arrivals(), bench.models[0]
    probe = bench.learner.probe(model)
    window, sketches = (
        bench.device(BalancedReservoir(), gist).window for gist in (LOCALLY, SKETCHED)
    )
    direction = bench.models[1][-bench.learner.gradient_size :]

    def counted() -> None:
        window.add(probe.measure(batch), batch.y)

    def valued() -> None:
        measured = probe.measure(batch)
        measured.projections(direction)
        window.add(measured, batch.y)

    def sketched() -> None:
        sketches.add(probe.measure(batch), batch.y)

    jobs = {
        "forward": forward_pass(bench.task, model, batch),
        "ode": valued,
        "gist": counted,
        "sketch": sketched,
    }
    seconds = interleaved(jobs, repetitions)
    over = {f"arrival_over_{name}": seconds["gist"] / seconds[name] for name in ("forward", "ode")}
    return over | {"arrival_sketch_over_forward": seconds["sketch"] / seconds["forward"]}


def wire_bytes(bench: Bench, policy: SelectionPolicy, gist: GistOptions) -> tuple[int, int]:
    """Count the bytes of an order and of its report, once there is a fleet's gradient to send."""
    device, direction, down, up = bench.device(policy, gist), None, 0, 0
    for round_ in range(2):
        device.observe(bench.arrivals(), float(round_))
        order = bench.order(round_, direction)
        report = device.participate(order)
        if report.local_gradient is not None:  # the server's mean is a plain vector
            direction = np.array(report.local_gradient)
        down, up = len(to_bytes(Participate.of(order))), len(to_bytes(Reported(report)))
    return down, up


def wire(bench: Bench) -> dict[str, float]:
    down, up = wire_bytes(bench, BalancedReservoir(), NONE)
    local, shared, sketched, smallest, ode = (
        wire_bytes(bench, policy, gist)
        for policy, gist in (
            (BalancedReservoir(), LOCALLY),
            (BalancedReservoir(), SHARED),
            (BalancedReservoir(), replace(SKETCHED, mode="shared")),
            (BalancedReservoir(), replace(SMALLEST, mode="shared")),
            (Ode(), NONE),
        )
    )
    return {
        "wire_local_over_fedavg": sum(local) / (down + up),
        "wire_shared_over_ode": sum(shared) / sum(ode),
        "wire_shared_down_over_fedavg": shared[0] / down,
        "wire_shared_up_over_fedavg": shared[1] / up,
        "wire_sketch_down_over_fedavg": sketched[0] / down,
        "wire_sketch_up_over_fedavg": sketched[1] / up,
        "wire_smallest_up_over_fedavg": smallest[1] / up,
    }


def footprint(bench: Bench) -> dict[str, float]:
    """Count what a device keeps for its gist, as it snapshots it after two participations.

    `kept_before` is what releases without sketches kept: m and G in float32, the window's sum in
    float64.
    """
    sizes = {}
    forms = {encoding: GistOptions("local", encoding=encoding) for encoding in ENCODINGS}
    for name, options in (forms | {"sketch": SKETCHED, "smallest": SMALLEST}).items():
        device = bench.device(BalancedReservoir(), options)
        for round_ in range(2):
            device.observe(bench.arrivals(), float(round_))
            device.participate(bench.order(round_))
        state = device.snapshot()
        kept = {key: array.nbytes for key, array in state.items()}
        sizes[f"bytes_{name}"] = float(sum(kept[key] for key in kept if key.startswith("gist.")))
        window = sum(kept[key] for key in kept if key.startswith("window."))
        sizes[f"kept_{name}"] = sizes[f"bytes_{name}"] + window
        if name == "float32":
            whole = state
    ram = {
        "window": whole["window.sum"].nbytes,
        "gist": sizes["bytes_float32"],
        "anchor": whole["model"].nbytes,
    }
    sizes["kept_before"] = 16.0 * bench.learner.gradient_size
    sizes["kept_sketch_over_before"] = sizes["kept_sketch"] / sizes["kept_before"]
    return sizes | {f"ram_{name}": float(size) for name, size in ram.items()}


def measure(stored: Stored, repetitions: int) -> dict[str, float]:
    bench = Bench(stored)
    times = {
        **participations(bench, repetitions),
        **arrivals(bench, repetitions),
    }
    return times | wire(bench) | footprint(bench)


TARGETS = {
    "participation_over_plain": "<= 2",
    "participation_sketch_over_plain": "<= 2",
    "arrival_sketch_over_forward": "<= 1.5",
    "wire_sketch_up_over_fedavg": "<= 1.1",
    "wire_smallest_up_over_fedavg": "<= 1.1",
    "kept_sketch_over_before": "<= 0.1",
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
    print(f"{'':33}" + "".join(f"{name:>12}" for name in results))
    for key in results["softmax"]:
        figures = "".join(
            f"{row[key]:12.2f}" if "over" in key else f"{row[key]:12,.0f}"
            for row in results.values()
        )
        print(f"{key:33}{figures}   {TARGETS.get(key, '')}".rstrip())
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
