"""A real SuperLink, SuperNodes with keys, TLS: the simulator's model, through `kill -9` of the server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app.user_config import UserConfig

from fedkeep.flower.in_process import InProcessGrid, make_node
from fedkeep.flower.local_fleet import LocalFleet
from fedkeep.flower.server_app import open_strategy
from fedkeep.sim.engine import Simulator
from tests.flower.real_fleet import APP, app_config, kill_server_app, saved_round, start_nodes, wait_until

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds the ServerApp's process in /proc"),
]

NODES, ROUNDS = 2, 5
SETTINGS: UserConfig = {
    "task__devices": NODES,
    "train__rounds": ROUNDS,
    "train__participation": 1.0,
    "rounds__deterministic": True,
    "rounds__min-devices": NODES,
}


def test_killed_servers_resume_to_the_bits_of_a_run_that_was_never_killed(tmp_path: Path) -> None:
    state, output = tmp_path / "state.db", tmp_path / "model.npy"
    settings: UserConfig = {key.replace("__", "."): value for key, value in SETTINGS.items()}
    settings |= {"state.url": str(state), "output": str(output)}
    with LocalFleet.private(tmp_path / "fleet", NODES) as fleet:
        fleet.start_superlink()
        fleet.register()
        start_nodes(fleet, NODES, **{"state-dir": str(tmp_path / "devices")})
        fleet.submit(APP, settings)
        wait_until(lambda: saved_round(state) >= 1, 120, "the first round")
        kill_server_app(fleet)
        fleet.submit(APP, {**settings, "state.resume": True})
        wait_until(lambda: saved_round(state) >= 3, 180, "the third round")
        fleet.kill("superlink")
        fleet.start_superlink()
        fleet.submit(APP, {**settings, "state.resume": True})
        wait_until(output.exists, 180, "the end of the run")
    model = np.load(output)
    assert model.tobytes() == _uninterrupted().tobytes()
    simulator = _simulated()
    assert np.abs(model - simulator).max() < 1e-6


def _uninterrupted() -> np.ndarray:
    from fedkeep_app.client_app import app
    from fedkeep_app.task import server_parts

    config = app_config(**SETTINGS)
    _, parts, sizes = server_parts(config)
    grid = InProcessGrid(make_node(number, app, config) for number in range(NODES))
    strategy = open_strategy(parts.server, sizes, config, participation=1.0)
    list(strategy.rounds(grid, ROUNDS))
    return strategy.server.model


def _simulated() -> np.ndarray:
    from fedkeep_app.task import experiment_of

    simulator = Simulator(experiment_of(app_config(**SETTINGS)))
    list(simulator.run())
    return simulator.server.model
