"""`fedkeep serve`, SuperNodes with keys, TLS: the simulator's model, through the server's kills."""

import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app.user_config import UserConfig

from fedkeep.flower.server_app import open_fleet
from fedkeep.sim.engine import Simulator
from tests.flower.in_process import InProcessGrid, make_node
from tests.flower.real_fleet import (
    APP,
    RealFleet,
    app_config,
    kill_server_app,
    saved_round,
    start_nodes,
    wait_until,
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not Path("/proc/self").exists(), reason="finds the ServerApp's process in /proc"
    ),
]

NODES, ROUNDS = 2, 5
SETTINGS: UserConfig = {
    "task__devices": NODES,
    "train__rounds": ROUNDS,
    "train__participation": 1.0,
    "rounds__deterministic": True,
    "rounds__min-devices": NODES,
}


def start_serving(fleet: RealFleet, settings: UserConfig, *more: str) -> None:
    """`fedkeep serve` as an operator types it."""
    where = fleet.deployment
    command = [sys.executable, "-m", "fedkeep", "serve", str(APP), "--credentials", str(where.root)]
    command += ["--port", str(where.port), "--state", str(where.root / "state.db"), *more]
    fleet.start(
        "serve",
        [
            *command,
            *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
        ],
    )


def test_killed_servers_resume_to_the_bits_of_a_run_that_was_never_killed(tmp_path: Path) -> None:
    output = tmp_path / "model.npy"
    settings: UserConfig = {key.replace("__", "."): value for key, value in SETTINGS.items()}
    settings |= {"output": str(output), "rounds.deterministic": "true"}
    with RealFleet.private(tmp_path / "fleet", NODES) as fleet:
        state = fleet.deployment.root / "state.db"
        start_serving(fleet, settings)
        wait_until(lambda: "the nodes are registered" in fleet.log("serve"), 300, "the SuperLink")
        start_nodes(fleet, NODES, **{"state-dir": str(tmp_path / "devices")})
        wait_until(lambda: saved_round(state) >= 1, 300, "the first round")
        kill_server_app(fleet)
        wait_until(
            lambda: saved_round(state) >= 3,
            300,
            "the third round, resumed by `fedkeep serve` itself",
        )
        fleet.kill("serve")
        start_serving(fleet, settings, "--resume")
        wait_until(output.exists, 300, "the end of the run")
        assert "the run ended as: finished" in fleet.log("serve")
    model = np.load(output)
    assert model.tobytes() == _uninterrupted().tobytes()
    simulator = _simulated()
    assert np.abs(model - simulator).max() < 1e-6


def _uninterrupted() -> np.ndarray:
    from fedkeep_app.client_app import app

    config = app_config(**SETTINGS)
    grid = InProcessGrid(make_node(number, app, config) for number in range(NODES))
    strategy = open_fleet(config)
    list(strategy.rounds(grid, ROUNDS))
    return strategy.server.model


def _simulated() -> np.ndarray:
    from fedkeep_app.task import experiment_of

    simulator = Simulator(experiment_of(app_config(**SETTINGS)))
    list(simulator.run())
    return simulator.server.model
