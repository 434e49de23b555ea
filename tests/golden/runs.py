"""Short seeded runs that cover every way of training and choosing, and their fingerprints."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedkeep.config.experiment import resolve
from fedkeep.core.types import Assignment, Batch, IntArray, LocalTraining, TrainOrder, Vector
from fedkeep.data import Federation, ModelSpec, Ownership
from fedkeep.sim.engine import Simulator
from fedkeep.sim.fleet import SimulatedFleet
from fedkeep.tables import Table, merged

DIGESTS = Path(__file__).with_name("digests.json")
DIRECTIONS = 8


@dataclass(frozen=True)
class Fingerprint:
    """One run: an exact hash of its choices, and its model's path, which depends on the machine."""

    choices: str
    """SHA-256 over the participants of every round and the ids stored on each device at the end."""
    moved: list[float]
    """The model's way from its start, along random directions that never change."""

    @staticmethod
    def of(
        participants: list[list[int]], stored: dict[int, list[int]], start: Vector, end: Vector
    ) -> "Fingerprint":
        facts = json.dumps([participants, sorted(stored.items())])
        directions = np.random.default_rng(0).standard_normal((DIRECTIONS, len(end)))
        return Fingerprint(
            hashlib.sha256(facts.encode()).hexdigest(),
            (directions @ (end.astype(np.float64) - start)).tolist(),
        )


def played(table: Table, data: Federation | None = None) -> Fingerprint:
    """The fingerprint of a simulated experiment."""
    simulator = Simulator(resolve(table), data)
    start = simulator.server.model.copy()
    participants = [list(map(int, record.summary.accepted)) for record in simulator.run()]
    fleet = simulator.parts.fleet
    devices = fleet.devices if isinstance(fleet, SimulatedFleet) else {}
    stored = {d: sorted(device.store.stored().batch.ids.tolist()) for d, device in devices.items()}
    return Fingerprint.of(participants, stored, start, simulator.server.model)


def embedded(**tables: Any) -> Fingerprint:
    """The embedded task, on which every policy has something to choose."""
    base: Table = {
        "task": {"name": "demo", "devices": 10},
        "policy": {"name": "fifo"},
        "storage": {"capacity": 6, "quotas": "hard"},
        "train": {"rounds": 12, "participation": 0.4, "learning_rate": 0.05, "epochs": 3},
        "aggregation": {"name": "fedavg"},
        "record": {"every": 1000},
    }
    return played(merged(base, tables))


def pictured(module: str, shape: tuple[int, ...], labels: int, **tables: Any) -> Fingerprint:
    """A few devices with blurred pictures of `labels` kinds."""
    base: Table = {
        "task": {"name": "demo"},
        "policy": {"name": "ode"},
        "storage": {"capacity": 5, "quotas": "hard"},
        "train": {"rounds": 6, "participation": 0.5, "learning_rate": 0.05, "epochs": 2},
        "stream": {"rounds_per_pass": 8},
        "aggregation": {"name": "fedavg"},
        "record": {"every": 1000},
    }
    options = {"classes": labels} if ":" in module else {}
    return played(merged(base, tables), small_federation(ModelSpec(module, options), shape, labels))


def small_federation(model: ModelSpec, shape: tuple[int, ...], labels: int) -> Federation:
    """Eight devices with forty samples each: noise around a mean for every label."""
    rng = np.random.default_rng(3)
    devices, each = 8, 40
    y: IntArray = rng.integers(0, labels, devices * each)
    means = rng.standard_normal((labels, *shape))
    x = (means[y] + rng.standard_normal((len(y), *shape))).astype(np.float32)
    owners, held_out = np.repeat(np.arange(devices), each), np.tile(np.arange(each) < 5, devices)
    members = Ownership.from_assignment(owners, devices)
    names = tuple(map(str, range(labels)))
    return Federation(
        "small", x, y, members.where(~held_out), members.where(held_out), names, model
    )


def headed() -> Fingerprint:
    """A device that values and trains the last layer of an ONNX file."""
    from fedkeep.core.device import Device
    from fedkeep.core.policies.ode import Ode
    from fedkeep.core.regions import LabelRegions
    from fedkeep.core.store import MemoryStore
    from fedkeep.core.velocity import VelocityMeter
    from fedkeep.learn.onnx_learner import OnnxLearner

    with TemporaryDirectory() as folder:
        learner = OnnxLearner(_exported(Path(folder)))
        device = Device(
            learner=learner,
            policy=Ode(),
            store=MemoryStore(np.zeros(4, dtype=np.int64)),
            regions=LabelRegions(4),
            meter=VelocityMeter(4),
            capacity=6,
            sample_shape=(2, 8),
            labels=4,
            seed=1,
        )
        start = model = learner.initial(0)
        device.set_model(model)
        device.apply_plan(Assignment(np.array([2, 2, 1, 1]), np.ones(4), 1.0))
        rng, direction = np.random.default_rng(4), None
        for round_ in range(6):
            device.observe(_sequences(rng, 15, 15 * round_), float(round_ + 1))
            report = device.participate(
                TrainOrder(round_, model, direction, LocalTraining(0.1, 3), round_ - 1)
            )
            model, direction = report.model, report.local_gradient
        return Fingerprint.of(
            [], {0: sorted(device.store.stored().batch.ids.tolist())}, start, model
        )


def _exported(folder: Path) -> Path:
    import torch

    from fedkeep.learn.export import export

    torch.manual_seed(0)
    export(_small_convolution, (2, 8), None, folder / "small.onnx")
    return folder / "small.onnx"


def _small_convolution() -> Any:
    from torch import nn

    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))


def _sequences(rng: np.random.Generator, n: int, first: int) -> Batch:
    return Batch(
        rng.standard_normal((n, 2, 8)).astype(np.float32),
        rng.integers(0, 4, n),
        np.arange(first, first + n),
    )


PICTURES = ((1, 28, 28), 4)
ODE = {"name": "ode"}
DRAWN: Table = {
    "policy": {"name": "ode", "choice": "drawn"},
    "storage": {"after_use": "evict_trained_first"},
    "weights": {"client_label": 1.0},
    "estimator": {"name": "round-mean"},
}

GIST: Table = {
    "policy": {"name": "balanced-reservoir"},
    "gist": {"mode": "shared"},
    "storage": {"quotas": "soft"},
}

RUNS: dict[str, Callable[[], Fingerprint]] = {
    "softmax-fifo": embedded,
    "softmax-reservoir": lambda: embedded(policy={"name": "reservoir"}),
    "softmax-high-loss": lambda: embedded(policy={"name": "high-loss"}),
    "softmax-fedbalancer": lambda: embedded(policy={"name": "fedbalancer"}),
    "softmax-ode-drawn": lambda: embedded(**DRAWN),
    "softmax-ode-paper": lambda: embedded(
        policy=ODE,
        preset="paper",
        coordinator={"name": "greedy"},
        estimator={"normalise": True},
        limits={"enabled": True},
    ),
    "softmax-unlimited": lambda: embedded(policy={"name": "full-data"}),
    "softmax-dropout-drift": lambda: embedded(
        policy=ODE, stream={"drift": 0.7}, train={"dropout": 0.3}
    ),
    "softmax-private": lambda: embedded(policy=ODE, privacy={"epsilon": 50.0, "clip": 0.5}),
    "mlp-ode": lambda: embedded(model={"name": "mlp", "hidden": [12]}, policy=ODE),
    "mlp-proximal": lambda: embedded(
        model={"name": "mlp", "hidden": [12]}, train={"proximal": 0.3}
    ),
    "mlp-fednova-minibatches": lambda: embedded(
        model={"name": "mlp", "hidden": [9, 7]},
        policy=ODE,
        train={"batch_size": 2},
        aggregation={"name": "fednova"},
    ),
    "mlp-last-layer": lambda: embedded(
        model={"name": "mlp", "hidden": [12], "last_layers": 1}, policy=ODE
    ),
    "mlp-wide": lambda: pictured("mlp", (90,), 5),
    "lenet-chain": lambda: pictured("lenet", *PICTURES),
    "lenet-minibatches": lambda: pictured(
        "lenet", *PICTURES, train={"batch_size": 2, "proximal": 0.1}
    ),
    "lenet-unlimited": lambda: pictured("lenet", *PICTURES, policy={"name": "full-data"}),
    "lenet-last-layer": lambda: pictured("lenet", *PICTURES, model={"last_layers": 1}),
    "traffic-chain": lambda: pictured("traffic-cnn", (3, 64), 4, train={"proximal": 0.2}),
    "torch-mapped": lambda: pictured(
        "tests.golden.modules:normalised", (12,), 4, policy={"name": "gradient-norm"}
    ),
    "torch-recurrent": lambda: pictured("tests.golden.modules:recurrent", (5, 4), 4),
    "onnx-head": headed,
    "softmax-bending": lambda: embedded(
        policy=ODE, storage={"quotas": "soft", "capacity": 4}, stream={"drift": 1.0}
    ),
    "softmax-gist": lambda: embedded(**GIST),
    "softmax-gist-int8": lambda: embedded(
        **merged(GIST, {"gist": {"mode": "local", "encoding": "int8"}})
    ),
    "mlp-gist-last-layer": lambda: embedded(
        **merged(GIST, {"model": {"name": "mlp"}, "gist": {"last_layers": 1}})
    ),
    "lenet-gist": lambda: pictured("lenet", *PICTURES, **GIST),
}
