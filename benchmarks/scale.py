"""What a large fleet costs the server: memory, its saved state, and time per round.

The real strategy plays rounds over a real state store with simulated clients: 1,000 devices, a
model of a million parameters, 50 participants a round, by default in a process of its own so that
its peak is that of nothing else. Larger fleets are computed from two sizes: what grows with the
devices is what the plan and the profiles take (docs/scale.md).
"""

import argparse
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedkeep.config.agreement import agreement_of
from fedkeep.config.method import parse_fleet
from fedkeep.core.gradients import Estimate, IncrementalEstimator
from fedkeep.core.types import Profile, Report
from fedkeep.flower import KeeperStrategy, codec
from fedkeep.flower.keeper_records import GRADIENT, KEEPER, VERSION, VERSION_KEY, encode
from fedkeep.flower.rounds import RoundOptions
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.strategy import FedkeepStrategy
from fedkeep.learn.models import learner_for
from fedkeep.protocol.messages import Participate, Profiled, Reported

MODELS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "softmax, 60 features, 10 labels": ("softmax", (60,), 10),
    "dense 900-100-5": ("mlp", (900,), 5),
    "LeNet, 28x28, 10 labels": ("lenet", (1, 28, 28), 10),
    "traffic CNN, 3x64, 20 labels": ("traffic-cnn", (3, 64), 20),
}


def lengths(name: str, shape: tuple[int, ...], classes: int) -> tuple[int, int]:
    """The length of a model, and of a gradient over the last layer alone."""
    return learner_for(name, shape, classes).size, learner_for(
        name, shape, classes, last_layers=1
    ).gradient_size


def memory(devices: int, length: int) -> float:
    """Bytes that the estimator keeps per device, over those of the estimate itself."""
    tracemalloc.start()
    estimator = IncrementalEstimator()
    for device in range(devices):
        estimator.update({device: Estimate(np.ones(length, dtype=np.float32), 1.0, 0)})
    estimator.global_gradient()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / devices / (4 * length)


def merge_seconds(devices: int, participants: int, length: int) -> float:
    """Processor seconds to take in one round's estimates and to give the new direction."""
    estimator = IncrementalEstimator()
    shared = np.ones(length, dtype=np.float32)
    estimator.update({device: Estimate(shared, 1.0, 0) for device in range(devices)})
    estimator.global_gradient()
    chosen = np.random.default_rng(0).choice(devices, participants, replace=False)
    news = {int(device): Estimate(shared + 1, 1.0, 1) for device in chosen}
    started = process_time()
    estimator.update(news)
    estimator.global_gradient()
    return process_time() - started


def peak_bytes() -> int:
    """Return the most memory that this process has had; not its parent's, as getrusage tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


Figures: TypeAlias = dict[str, float]

_REPLIES_AT_ONCE = 4
"""Per request for replies, as they come over a network; Flower's grid has eight under way."""


class SimulatedClients(Grid):
    """A grid whose nodes make up their replies when they are fetched: clients without memory."""

    def __init__(self, devices: int, parameters: int, labels: int, agreement: dict[str, str]):
        self._nodes = [
            NodeInfo(node_id=1000 + n, public_key=f"key {n}".encode()) for n in range(devices)
        ]
        self._agreement, self._labels = agreement, labels
        self._draw = np.random.default_rng(0)
        self._update = 0.001 * self._draw.standard_normal(parameters).astype(np.float32)
        self._asked: dict[str, Message] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: Any) -> None:
        """There is one run."""

    @property
    def run(self) -> Any:
        """There is none with a number."""
        raise AttributeError("simulated clients have no run")

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Nobody asks for this."""
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        """All are online."""
        return [node.node_id for node in self._nodes]

    def get_nodes(self) -> list[NodeInfo]:
        """All are online."""
        return self._nodes

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Remember what is asked."""
        ids = []
        for message in messages:
            ids.append(f"message-{id(message)}-{message.metadata.dst_node_id}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._asked[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Reply to a few at a time, as a network would."""
        ids = [key for key in message_ids if key in self._asked][:_REPLIES_AT_ONCE]
        return [self._reply(self._asked.pop(key)) for key in ids]

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> list[Message]:
        """Nobody asks for this."""
        raise NotImplementedError

    def _reply(self, message: Message) -> Message:
        number = message.metadata.dst_node_id - 1000
        if message.metadata.message_type == codec.PROFILE:
            profile = Profile(50, self._draw.uniform(1, 5, self._labels))
            content = codec.encode(Profiled(profile, number, f"device {number}", self._agreement))
        else:
            order = codec.decode(message.content, Participate).order
            noise = np.float32(self._draw.standard_normal())
            model = order.model + self._update * noise
            report = Report(order.round, model, 50.0, 5, 50, self._update * (1 + noise / 10), 50)
            content = codec.encode(Reported(report))
        return Message(content, reply_to=message)


class SimulatedKeepers(SimulatedClients):
    """The same nodes behind `KeeperStrategy`: apps of one's own, with a Keeper."""

    def _reply(self, message: Message) -> Message:
        arrays = next(iter(message.content.array_records.values()))
        model, noise = arrays["model"].numpy(), np.float32(self._draw.standard_normal())
        update = self._update * noise
        gradient = encode(self._update * (1 + noise / 10))
        counts = {"samples": 50, "offered": 50, "stored": 50, "unsound": 0, VERSION_KEY: VERSION}
        content = RecordDict(
            {
                "arrays": ArrayRecord({"model": Array(model + update)}),
                "metrics": MetricRecord({"num-examples": 50}),
                KEEPER: ConfigRecord({**counts, GRADIENT: gradient}),
            }
        )
        return Message(content, reply_to=message)


def play_keepers(devices: int, parameters: int, participants: int, rounds: int = 3) -> Figures:
    """Play rounds of Flower's FedAvg inside `KeeperStrategy`; return peak and time."""
    strategy = KeeperStrategy(FedAvg(fraction_train=participants / devices, fraction_evaluate=0.0))
    grid = SimulatedKeepers(devices, parameters, 10, {})
    arrays = ArrayRecord({"model": Array(np.zeros(parameters, dtype=np.float32))})
    before = process_time()
    result = strategy.start(grid, arrays, rounds)
    seconds = (process_time() - before) / rounds
    estimates = result.train_metrics_clientapp[rounds]["keeper-estimates"]
    assert isinstance(estimates, int), estimates
    assert estimates > participants // 2, estimates
    peak = peak_bytes()
    return {"peak_bytes": peak, "round_seconds": seconds}


def play(
    devices: int, parameters: int, participants: int, rounds: int = 3, aggregation: str = "robust"
) -> Figures:
    """Play rounds with the real strategy and a real store; return peak, sizes and times."""
    labels = 10
    spec = parse_fleet(
        {
            "samples": {"shape": [parameters // labels - 1], "labels": labels},
            "model": {"name": "softmax"},
            "aggregation": {"name": aggregation},
            "train": {"participation": participants / devices},
        }
    )
    agreement = agreement_of(spec, spec.regions.count)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "state.db"
        options = RoundOptions(
            participants / devices, over_selection=1.0, deadline=600.0, min_devices=devices
        )
        strategy = FedkeepStrategy(spec.server(), options, StateStore(str(file), "scale"))
        grid = SimulatedClients(devices, len(strategy.server.model), labels, agreement)
        seconds = []
        before = process_time()
        for outcome in strategy.rounds(grid, rounds):
            accepted = len(outcome.summary.accepted)
            assert accepted == participants, (accepted, outcome.rejections, outcome.summary.missing)
            seconds.append(process_time() - before)
            before = process_time()
        peak = peak_bytes()
        return {
            "devices": devices,
            "parameters": len(strategy.server.model),
            "peak_bytes": peak,
            "state_bytes": file.stat().st_size,
            "round_seconds": seconds[-1],
        }


def played_alone(devices: int, parameters: int, participants: int, kind: str) -> Figures:
    """Play rounds in a process of its own: `kind` is an aggregation, or `keepers`."""
    words = f"{devices},{parameters},{participants},{kind}"
    done = subprocess.run(
        [sys.executable, __file__, "--play", words], check=True, capture_output=True, text=True
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def play_as_told(words: str) -> Figures:
    """Play what `played_alone` asks for."""
    *numbers, kind = words.split(",")
    devices, parameters, participants = map(int, numbers)
    if kind == "keepers":
        return play_keepers(devices, parameters, participants)
    return play(devices, parameters, participants, aggregation=kind)


def fleets(parameters: int) -> Figures:
    """Measure a fleet of 1,000 devices by each kind, and compute what larger ones take."""
    figures: Figures = {}
    # What grows with the devices: two fleets with a model that takes no room.
    few, many = (played_alone(n, 310, 50, "robust") for n in (1_000, 5_000))
    for key in ("peak_bytes", "state_bytes"):
        figures[f"{key}_per_device"] = (many[key] - few[key]) / 4_000
    print(
        f"a device more: {figures['peak_bytes_per_device']:,.0f} bytes of memory, "
        f"{figures['state_bytes_per_device']:,.0f} of saved state"
    )
    for kind in ("robust", "fedavg", "keepers"):
        fleet = played_alone(1_000, parameters, 50, kind)
        figures |= {f"{kind}_{key}": value for key, value in fleet.items()}
        print(
            f"1,000 devices, {parameters:,} parameters, 50 a round, {kind}: "
            f"peak {fleet['peak_bytes'] / 1e6:,.0f} MB, saved "
            f"{fleet.get('state_bytes', 0) / 1e6:,.1f} MB, "
            f"{fleet['round_seconds']:.1f} s of the processor a round"
        )
        for size in () if kind == "keepers" else (100_000, 1_000_000):
            peak, state = (
                fleet[key] + (size - 1_000) * figures[f"{key}_per_device"]
                for key in ("peak_bytes", "state_bytes")
            )
            figures |= {f"{kind}_peak_bytes_{size}": peak, f"{kind}_state_bytes_{size}": state}
            words = f"peak {peak / 1e9:.2f} GB, saved {state / 1e6:.0f} MB"
            print(f"  {size:,} devices, computed: {words}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the devices")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        print(json.dumps(play_as_told(options.play)))
        return
    devices = 2_000 if options.quick else 20_000
    figures: Figures = {}
    print(f"{'model':<34}{'P':>9}{'last layer':>12}")
    for title, (name, shape, classes) in MODELS.items():
        size, head = lengths(name, shape, classes)
        figures |= {f"{name}_size": size, f"{name}_last_layer": head}
        print(f"{title:<34}{size:>9,}{head:>12,}")
    figures["memory_over_estimate"] = memory(devices // 4, 1_000)
    print(f"memory kept, over the estimates alone: {figures['memory_over_estimate']:.2f}x")
    for length in (850, 4_000):
        key = f"merge_{length}_seconds"
        figures[key] = merge_seconds(devices, devices // 20, length)
        print(
            f"merging {devices // 20} of {devices} estimates of {length}:"
            f" {figures[key]:.2f} s of the processor"
        )
    parameters = 100_000 if options.quick else 1_000_000
    figures |= fleets(parameters)
    if options.json:
        options.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
