"""What `keeper.correct` adds to a Keeper: accuracy with and without it, over twelve combinations.

    python benchmarks/keeper_correct.py [--task clusters|waves] [--seeds 10 11 12 13 14] [--quick]

Ten devices, labels in runs of about fifteen arrivals, stores of twelve samples, FedAvg around the
Keepers, all in this process. The rule of docs/flower.md was settled on `clusters` with seeds 0 and
1 and is reported on `waves` with seeds from 10 on.
"""

import argparse
import json
import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fedkeep.flower import Keeper, KeeperStrategy  # noqa: E402
from tests.flower.in_process import InProcessGrid, make_node  # noqa: E402

DEVICES, CLASSES, FEATURES, ARRIVALS, CAPACITY = 10, 10, 20, 20, 12


@dataclass(frozen=True)
class Combination:
    """A model, its optimizer with a rate, and the share of devices in each round."""

    model: str
    optimizer: str
    rate: float
    participation: float

    def __str__(self) -> str:
        return f"{self.model}, {self.optimizer} {self.rate:g}, {self.participation:g}"


COMBINATIONS = (
    Combination("linear", "sgd", 0.1, 0.3),
    Combination("linear", "sgd", 0.4, 1.0),
    Combination("mlp", "sgd", 0.05, 0.3),
    Combination("mlp", "sgd", 0.1, 1.0),
    Combination("mlp", "sgd", 0.4, 0.3),
    Combination("mlp", "momentum", 0.02, 0.3),
    Combination("mlp", "momentum", 0.1, 0.3),
    Combination("mlp", "momentum", 0.05, 1.0),
    Combination("mlp", "adam", 0.003, 0.3),
    Combination("mlp", "adam", 0.01, 1.0),
    Combination("layer-norm", "sgd", 0.1, 0.3),
    Combination("batch-norm", "sgd", 0.1, 0.3),
)


def make_model(name: str) -> nn.Module:
    """Make a model, by the present state of torch's random numbers."""
    if name == "linear":
        return nn.Linear(FEATURES, CLASSES)
    norm: list[nn.Module] = []
    if name == "layer-norm":
        norm = [nn.LayerNorm(32)]
    if name == "batch-norm":
        norm = [nn.BatchNorm1d(32)]
    return nn.Sequential(nn.Linear(FEATURES, 32), *norm, nn.ReLU(), nn.Linear(32, CLASSES))


def make_optimizer(name: str, rate: float, net: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer of a module's parameters."""
    if name == "adam":
        return torch.optim.Adam(net.parameters(), lr=rate)
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9 if name == "momentum" else 0.0)


class Task:
    """Samples of ten classes that come in runs of a label."""

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        rng = np.random.default_rng((seed, 1))
        self._centres = rng.normal(size=(CLASSES, 3, FEATURES)) * 1.3
        self._phases = rng.uniform(0, 6.3, size=(CLASSES, 2))
        self._speeds = rng.uniform(0.3, 2.5, size=(CLASSES, 2))

    def samples(self, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw a sample of each of these classes."""
        if self._name == "clusters":
            centre = self._centres[y, rng.integers(0, 3, len(y))]
            return np.asarray(centre + rng.normal(size=centre.shape), dtype=np.float32)
        at = np.arange(FEATURES)[None]
        shift = rng.uniform(-0.6, 0.6, size=(len(y), 2))
        waves = [
            np.sin(self._speeds[y, k, None] * at + (self._phases[y, k] + shift[:, k])[:, None])
            for k in range(2)
        ]
        noise = rng.normal(size=waves[0].shape) * 0.7
        return np.asarray(waves[0] + waves[1] + noise, dtype=np.float32)

    def arrivals(self, device: int, round_: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw what came to a device since its last round: a run of a label, and a second."""
        rng = np.random.default_rng((self._seed, 2, device, round_))
        first, second = rng.integers(0, CLASSES, 2)
        y = np.where(np.arange(ARRIVALS) < 15, first, second)
        return self.samples(y, rng), y

    def test(self) -> tuple[np.ndarray, np.ndarray]:
        """Samples of all classes alike."""
        rng = np.random.default_rng((self._seed, 3))
        y = rng.integers(0, CLASSES, 2000)
        return self.samples(y, rng), y


def client(task: Task, chosen: Combination, correct: bool) -> Callable[[Message, Context], Message]:
    """Make the ClientApp of one run."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        round_, device = int(str(msg.content["config"]["server-round"])), context.node_id - 1000
        torch.manual_seed(round_ * 1000 + device)
        net = make_model(chosen.model)
        net.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        with Keeper.open(context, net, CAPACITY) as keeper:
            keeper.offer(*task.arrivals(device, round_))
            keeper.sync(msg)
        loader = torch.utils.data.DataLoader(keeper.samples(), batch_size=6, shuffle=True)  # type: ignore[arg-type,var-annotated]
        optimizer = make_optimizer(chosen.optimizer, chosen.rate, net)
        if correct:
            keeper.correct(net, optimizer)
        net.train()
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(net(x), y))
                optimizer.step()
        content: dict[str, Any] = {"arrays": ArrayRecord(net.state_dict()), **keeper.records()}
        content["metrics"] = MetricRecord({"num-examples": 1})
        return Message(RecordDict(content), reply_to=msg)

    return app


def accuracy(task: Task, chosen: Combination, seed: int, rounds: int, correct: bool) -> float:
    """Mean accuracy in per cent over the last quarter of the rounds."""
    random.seed(seed)
    torch.manual_seed(seed)
    app = client(task, chosen, correct)
    grid = InProcessGrid([make_node(number, app, {}) for number in range(DEVICES)])
    initial = ArrayRecord(make_model(chosen.model).state_dict())
    inner = FedAvg(fraction_train=chosen.participation, fraction_evaluate=0.0)
    x, y = task.test()
    found: list[float] = []

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        net = make_model(chosen.model)
        net.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            right = net.eval()(torch.tensor(x)).argmax(1).numpy() == y
        found.append(100 * float(right.mean()))
        return MetricRecord({"accuracy": found[-1]})

    strategy = KeeperStrategy(inner)
    strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=evaluate)
    return float(np.mean(found[-max(1, rounds // 4) :]))


def main() -> None:
    """Print a row for each combination."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=["clusters", "waves"], default="waves")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", type=int, nargs="+", default=range(len(COMBINATIONS)))
    parser.add_argument("--quick", action="store_true", help="one seed and three rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    seeds, rounds = ([10], 3) if options.quick else (options.seeds, options.rounds)
    rows = []
    for chosen in (COMBINATIONS[number] for number in options.only):
        pairs = []
        for seed in seeds:
            task = Task(options.task, seed)
            pairs.append([accuracy(task, chosen, seed, rounds, c) for c in (False, True)])
        without, with_it = np.mean(pairs, axis=0)
        gains = np.diff(pairs, axis=1)[:, 0]
        row = {"combination": str(chosen), "without": without, "with": with_it}
        row |= {"gain": gains.mean(), "spread": gains.std()}
        rows.append(row)
        print(
            f"{row['combination']:32} {without:6.1f} {with_it:6.1f} "
            f"{gains.mean():+6.2f} +- {gains.std():.2f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
