"""A real SuperLink, SuperNodes with keys, key-holder over TLS: the plan of unreadable profiles."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app.user_config import UserConfig

from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.deploy.credentials import provision
from fedkeep.flower.state_store import StateStore
from fedkeep.keyholder.sealing import create_key
from fedkeep.sim.assembly import assemble
from tests.flower.real_fleet import APP, RealFleet, app_config, start_nodes, wait_until
from tests.keyholder.holder_process import HolderProcess

pytestmark = pytest.mark.real
pytest.importorskip("cryptography", reason="needs the privacy extra")

NODES = 3
SETTINGS: UserConfig = {
    "task__devices": NODES,
    "train__rounds": 2,
    "train__participation": 1.0,
    "rounds__min-devices": NODES,
    "privacy__encrypted-profiles": True,
}


def test_a_deployment_plans_from_encrypted_profiles(tmp_path: Path) -> None:
    keys, root, state = tmp_path / "keys", tmp_path / "fleet", tmp_path / "state.db"
    public = create_key(keys).hex()
    with RealFleet.private(root, NODES) as fleet:
        provision(root, [fleet.deployment.host], [], keyholder_hosts=["127.0.0.1"])
        holder = HolderProcess(keys, root)
        holder.start()
        try:
            fleet.start_superlink()
            fleet.register()
            start_nodes(fleet, NODES, **{"public-key": public})
            settings: UserConfig = {
                key.replace("__", "."): value for key, value in SETTINGS.items()
            }
            where = {
                "keyholder.address": f"127.0.0.1:{holder.port}",
                "keyholder.credentials": str(root),
            }
            fleet.submit(
                APP,
                {
                    **settings,
                    **where,
                    "state.url": str(state),
                    "output": str(tmp_path / "model.npy"),
                },
            )
            wait_until((tmp_path / "model.npy").exists, 240, "the end of the run")
        finally:
            holder.kill()
    saved = StateStore(str(state), "default").load()
    assert saved is not None
    assert np.isnan(saved.state["roster.velocities"]).all(), "the server knows no velocity"
    plain = _plain_quotas()
    np.testing.assert_array_equal(saved.state["server.plan.devices"], np.arange(NODES))
    np.testing.assert_array_equal(saved.state["server.plan.quotas"], plain)


def _plain_quotas() -> np.ndarray:
    from fedkeep_app.task import experiment_of

    experiment = experiment_of(app_config(**SETTINGS))
    parts = assemble(experiment)
    capacities = np.full(NODES, experiment.storage.capacity)
    assert isinstance(experiment.coordinator, Greedy)
    return np.asarray(
        experiment.coordinator.plan(FleetProfiles.numbered(capacities, parts.velocities)).quotas
    )
