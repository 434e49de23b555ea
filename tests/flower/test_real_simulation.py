"""Flower's own simulation runtime, with virtual nodes, ends with the simulator's model."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app.user_config import UserConfig

from fedkeep.deploy.local_fleet import LocalFleet, free_port
from fedkeep.sim.engine import Simulator
from tests.flower.real_fleet import APP, Simulation, app_config

pytest.importorskip("ray", reason="needs flwr[simulation]")
pytestmark = pytest.mark.real

NODES, ROUNDS = 6, 4


class AsStartedByFlower(Simulation):
    """The SuperLink that `flwr run . local` starts installs what an app asks for; ours do not."""

    def superlink(self) -> list[str]:
        return [
            word
            for word in super().superlink()
            if word != "--disable-runtime-dependency-installation"
        ]


def test_virtual_nodes_end_with_the_simulators_model(tmp_path: Path) -> None:
    from fedkeep_app.task import experiment_of

    output = tmp_path / "model.npy"
    settings: UserConfig = {
        "task.devices": NODES,
        "train.rounds": ROUNDS,
        "rounds.deterministic": True,
    }
    settings |= {"rounds.min-devices": NODES, "output": str(output)}
    deployment = AsStartedByFlower(tmp_path / "fleet", port=free_port(), insecure=True)
    with LocalFleet(deployment) as fleet:
        fleet.start_superlink()
        said = fleet.call([*deployment.run_virtual(APP, settings, NODES), "--stream"], timeout=240)
    assert output.exists(), said[-2000:]
    simulator = Simulator(experiment_of({**app_config(), **settings}))
    list(simulator.run())
    assert np.abs(np.load(output) - simulator.server.model).max() < 1e-6
