"""A net of ten million parameters in the simulator and in a Keeper: RAM and bytes.

    python benchmarks/large_model.py --json FILE [--width 1024] [--rounds 2]

The net is residual, with layer normalisation: ten weights of a million parameters each. Each case
runs in a process of its own, so that its peak of memory is that of nothing else; `base_mb` is a
process that has imported everything and made the net once. Bytes are those of one device, as it
snapshots itself: m, the window's sum, and what goes up and comes down beside the model.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from time import process_time

import numpy as np
import torch
from torch import Tensor, nn

BLOCKS = 5
FEATURES, LABELS = 30, 10
GISTS: dict[str, dict[str, str]] = {
    "none": {"mode": "none"},
    "whole": {"mode": "shared"},
    "sketch": {"mode": "shared", "rank": "auto", "encoding": "int8"},
}


class Block(nn.Module):
    """x + W2 relu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.second(torch.relu(self.first(self.norm(x))))
        return x + changed


def residual_net(width: int = 1024) -> nn.Module:
    """Five residual blocks: 10.5 million parameters at a width of 1,024."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(FEATURES, width),
        *(Block(width) for _ in range(BLOCKS)),
        nn.LayerNorm(width),
        nn.Linear(width, LABELS),
    )


def simulated(gist: dict[str, str], width: int, rounds: int) -> dict[str, float]:
    """Play rounds of four devices, two of which take part in each."""
    from fedkeep.config.experiment import resolve
    from fedkeep.learn.models import session_model
    from fedkeep.sim.engine import Simulator

    model = session_model(lambda: residual_net(width), "large")
    experiment = resolve(
        {
            "task": {"name": "demo", "devices": 4},
            "model": {"name": model},
            "policy": {"name": "balanced-reservoir"},
            "gist": gist,
            "storage": {"capacity": 5},
            "train": {"rounds": rounds, "participation": 0.5, "epochs": 2, "learning_rate": 0.01},
            "aggregation": {"name": "fedavg"},
        }
    )
    began = process_time()
    simulator = Simulator(experiment)
    last = list(simulator.run())[-1]
    if last.summary.rejections:
        raise RuntimeError(f"a report did not count: {last.summary.rejections[0]}")
    size = float(simulator.parts.learner.size)
    return {"parameters": size, "seconds": process_time() - began}


def kept(gist: dict[str, str], width: int, rounds: int) -> dict[str, float]:
    """One node's Keeper over rounds: offer, sync, train, reply; the bytes that it keeps."""
    from flwr.app import ArrayRecord, Context, RecordDict

    from fedkeep.flower import Keeper

    context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})
    rng, sizes = np.random.default_rng(0), dict[str, float]()
    net = residual_net(width)
    began = process_time()
    for _ in range(rounds):
        with Keeper.open(context, lambda: residual_net(width), 5, gist=gist) as keeper:
            x = rng.standard_normal((32, FEATURES), dtype=np.float32)
            keeper.offer(x, rng.integers(0, LABELS, 32))
            keeper.sync(ArrayRecord(net.state_dict()))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            keeper.correct(net, optimizer)
            for sample, label in keeper.samples():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(
                    net(torch.tensor(sample)[None]), torch.tensor([int(label)])
                )
                torch.autograd.backward(loss)
                optimizer.step()
            about = keeper.records()["fedkeep.keeper"]
        up = sum(len(v) for v in about.values() if isinstance(v, bytes))
        numbers = sum(map(torch.numel, net.parameters()))
        sizes = {"up_bytes": float(up), "model_bytes": 4.0 * numbers}
    return sizes | {"seconds": process_time() - began}


def device_bytes(gist: dict[str, str], width: int) -> dict[str, float]:
    """What a device keeps of a gist, without making it."""
    from fedkeep.advice.budget import kept_bytes
    from fedkeep.config.method import parse_method
    from fedkeep.learn.torch_learner import TorchLearner

    learner = TorchLearner(lambda: residual_net(width))
    method = parse_method({"policy": {"name": "balanced-reservoir"}, "gist": gist})
    found = kept_bytes(method, learner, slots=5, sample_shape=(FEATURES,), labels=LABELS)
    return {"gist_bytes": float(found.gist), "window_bytes": float(found.window)}


def case(name: str, gist: str, width: int, rounds: int) -> dict[str, float]:
    """Run one case in a process of its own."""
    call = [sys.executable, __file__, "--case", name, gist, str(width), str(rounds)]
    found = subprocess.run(call, check=True, capture_output=True, text=True)
    line: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return line


def run_case(name: str, gist: str, width: int, rounds: int) -> None:
    torch.set_num_threads(1)
    if name == "base":
        import fedkeep.flower
        import fedkeep.sim.engine  # noqa: F401

        residual_net(width)
        found: dict[str, float] = {}
    else:
        found = (simulated if name == "simulator" else kept)(GISTS[gist], width, rounds)
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        name, gist, width, rounds = options.case
        run_case(name, gist, int(width), int(rounds))
        return
    base = case("base", "none", options.width, options.rounds)["peak_mb"]
    results: dict[str, float] = {"base_mb": base}
    for gist, options_of in GISTS.items():
        for name in ("simulator", "keeper"):
            found = case(name, gist, options.width, options.rounds)
            results |= {f"{name}_{gist}_{key}": value for key, value in found.items()}
        sizes = device_bytes(options_of, options.width)
        results |= {f"{gist}_{key}": value for key, value in sizes.items()}
    for key, value in results.items():
        print(f"{key:32}{value:16,.1f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
