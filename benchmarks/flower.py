"""A round over a real SuperLink: fedkeep's app against Flower's own FedAvg app.

    python benchmarks/flower.py [--quick] [--json FILE] [--agents] [--secure] [--simulation NODES]

Model, nodes and machine are the same. `--agents` plays fifteen rounds with streaming agents, once
with ODE and once with a random store. `--secure` plays rounds by secure sums against rounds in the
clear. `--simulation` runs as many virtual devices in Flower's simulation (needs flwr[simulation]).
What corrections add to a Keeper is measured by `benchmarks/keeper_correct.py`.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fedkeep.core.types import LocalTraining, Report, TrainOrder  # noqa: E402
from fedkeep.deploy.local_fleet import free_port  # noqa: E402
from fedkeep.flower import codec  # noqa: E402
from fedkeep.protocol.messages import Participate, Reported  # noqa: E402
from tests.flower.real_fleet import (  # noqa: E402
    APP,
    RealFleet,
    Simulation,
    agent_answers,
    start_agent,
    start_nodes,
    wait_until,
)

FEDAVG = ROOT / "benchmarks" / "fedavg_app"
PARAMETERS = 310


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two nodes and three rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--agents", action="store_true", help="also ODE against a random store, with agents"
    )
    parser.add_argument("--secure", action="store_true", help="also rounds by secure sums")
    parser.add_argument(
        "--simulation", type=int, default=0, metavar="NODES", help="also Flower's simulation"
    )
    options = parser.parse_args()
    nodes, rounds = (2, 3) if options.quick else (4, 8)
    figures: dict[str, float] = compare_rounds(nodes, rounds) | message_bytes()
    if options.secure:
        figures |= compare_secure(nodes, rounds)
    if options.agents:
        figures |= compare_stores(nodes, 3 if options.quick else 15)
    if options.simulation:
        figures |= simulate(options.simulation, rounds)
    for name, value in figures.items():
        print(f"{name:36} {value:12.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def compare_rounds(nodes: int, rounds: int) -> dict[str, float]:
    """Median seconds of a round, the first left out, with simulated devices on both sides."""
    with (
        tempfile.TemporaryDirectory() as name,
        RealFleet.private(Path(name) / "fleet", nodes) as fleet,
    ):
        fleet.start_superlink()
        fleet.register()
        start_nodes(fleet, nodes, **{"state-dir": f"{name}/devices"})
        stock = fleet.run(FEDAVG, {"rounds": rounds, "devices": nodes}, timeout=1800)
        settings = {"task.devices": nodes, "train.rounds": rounds, "train.participation": 1.0}
        ours = fleet.run(
            APP, {**settings, "rounds.min-devices": nodes, "rounds.deadline": 600.0}, timeout=1800
        )
    theirs = median(float(s) for s in re.findall(r"round \d+ seconds ([0-9.]+)", stock)[2:])
    mine = median(float(s) for s in re.findall(r"'seconds': ([0-9.]+)", ours)[1:])
    return {
        "fedavg_seconds_a_round": theirs,
        "fedkeep_seconds_a_round": mine,
        "fedavg_over_fedkeep": theirs / mine,
    }


def compare_secure(nodes: int, rounds: int) -> dict[str, float]:
    """Median seconds of a round in the clear and of one by a secure sum, the first left out."""
    seconds = {}
    with (
        tempfile.TemporaryDirectory() as name,
        RealFleet.private(Path(name) / "fleet", nodes) as fleet,
    ):
        fleet.start_superlink()
        fleet.register()
        start_nodes(fleet, nodes, **{"state-dir": f"{name}/devices"})
        settings = {"task.devices": nodes, "train.rounds": rounds, "train.participation": 1.0}
        rest = {"rounds.min-devices": nodes, "rounds.deadline": 600.0}
        for kind, secure in (("clear", False), ("secure", True)):
            printed = fleet.run(
                APP,
                {**settings, **rest, "privacy.secure-aggregation": secure, "state.run": kind},
                timeout=1800,
            )
            seconds[kind] = median(
                float(s) for s in re.findall(r"'seconds': ([0-9.]+)", printed)[1:]
            )
    return {f"{kind}_seconds_a_round": s for kind, s in seconds.items()} | {
        "secure_over_clear": seconds["secure"] / seconds["clear"]
    }


def message_bytes() -> dict[str, float]:
    """Count the bytes of arrays that one device sends and is sent in a round."""
    vector = np.ones(PARAMETERS, dtype=np.float32)
    order = codec.encode(Participate(TrainOrder(0, vector, vector, LocalTraining(0.1, 1))))
    report = codec.encode(Reported(Report(0, vector, 1.0, 1, 1, vector, 1)))
    down, up = (
        sum(len(array.data) for array in content.array_records[codec.ARRAYS].values())
        for content in (order, report)
    )
    return {
        "bytes_down": float(down),
        "bytes_up": float(up),
        "bytes_of_the_model": 4.0 * PARAMETERS,
    }


def compare_stores(nodes: int, rounds: int) -> dict[str, float]:
    """Compare accuracy over agents that keep by ODE with that over agents that keep at random."""
    figures = {}
    for policy in ("ode", "reservoir"):
        with (
            tempfile.TemporaryDirectory() as name,
            RealFleet.private(Path(name) / "fleet", nodes) as fleet,
        ):
            fleet.start_superlink()
            fleet.register()
            for number in range(nodes):
                socket = start_agent(fleet, number, nodes, policy)
                wait_until(partial(agent_answers, socket), 60, "an agent's start")
                fleet.start_node(number, {"device": number, "agent-socket": str(socket)})
            settings = {"task.devices": nodes, "train.rounds": rounds, "train.participation": 1.0}
            rest = {"policy.name": policy, "rounds.min-devices": nodes, "rounds.deadline": 600.0}
            rest |= {"rounds.evaluate-every": rounds}
            printed = fleet.run(APP, {**settings, **rest}, timeout=1800)
        figures[f"accuracy_{policy}"] = float(re.findall(r"'accuracy': ([0-9.]+)", printed)[-1])
    return figures


def simulate(nodes: int, rounds: int) -> dict[str, float]:
    """Seconds of a run of virtual devices, a tenth of them in each round."""
    with tempfile.TemporaryDirectory() as name:
        deployment = Simulation(Path(name) / "fleet", port=free_port(), insecure=True)
        with RealFleet(deployment) as fleet:
            fleet.start_superlink()
            settings = {"task.devices": nodes, "train.rounds": rounds, "train.participation": 0.1}
            rest = {"rounds.min-devices": nodes, "rounds.deadline": 600.0}
            began = time.monotonic()
            printed = fleet.call(
                [*deployment.run_virtual(APP, {**settings, **rest}, nodes), "--stream"],
                timeout=3600,
            )
            seconds = time.monotonic() - began
    mine = median(float(s) for s in re.findall(r"'seconds': ([0-9.]+)", printed))
    return {
        "virtual_devices": float(nodes),
        "simulation_seconds": seconds,
        "simulation_seconds_a_round": mine,
    }


if __name__ == "__main__":
    main()
