"""A real fleet of agents with regions around centroids and the exact plan, as its files say."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.data.synthetic import Demo
from fedkeep.deploy.first_fleet import FirstFleet
from fedkeep.deploy.local_fleet import free_port
from fedkeep.flower.server_app import check_specification
from fedkeep.flower.state_store import StateStore
from fedkeep.solvers import Exact, KMeans
from tests.flower.real_fleet import saved_round, wait_until
from tests.flower.test_real_first_fleet import fedkeep

pytestmark = pytest.mark.real
pytest.importorskip("scipy")
pytest.importorskip("sklearn")

DEVICES, REGIONS = 3, 4


def test_agents_divide_their_stores_around_centroids_by_the_exact_plan(tmp_path: Path) -> None:
    data = Demo(devices=DEVICES).load(seed=0)
    clusters = KMeans(count=REGIONS)
    own = [data.take(data.train.of(device)).x for device in range(DEVICES)]
    found = clusters.merge([clusters.summarise(points) for points in own])
    centroids = msgspec.json.encode(found.centroids).decode()
    shared = f'\n[policy]\nname = "ode"\n\n[regions]\nname = "k-means"\ncentroids = {centroids}\n'
    root = tmp_path / "f"
    fedkeep("init", root, "--devices", DEVICES)
    fleet = FirstFleet(root)
    with fleet.specification.open("a") as file:
        limits = "clients_per_label = 2\nlabels_per_client = 3\n"
        file.write(f'{shared}\n[coordinator]\nname = "exact"\n{limits}')
    for number in range(DEVICES):
        with (fleet.home(number) / "agent.toml").open("a") as file:
            file.write(shared)
    fedkeep("start", root, "--port", free_port(), "--page", free_port())
    try:
        wait_until(lambda: saved_round(fleet.state, "fleet") >= 2, 480, "two rounds")
    finally:
        fedkeep("stop", root)
    saved = StateStore(str(fleet.state), "fleet").load()
    assert saved is not None
    quotas = saved.state["server.plan.quotas"]
    assert quotas.shape == (DEVICES, REGIONS)
    assert ((quotas > 0).sum(axis=1) <= 3).all(), "a device holds at most three regions"
    capacities = quotas.sum(axis=1)
    assert (capacities > 0).all()
    velocities = saved.state["roster.velocities"]
    assert velocities.shape == (DEVICES, REGIONS)
    assert np.isfinite(velocities).all()
    coordinator = check_specification(fleet.specification).coordinator
    assert isinstance(coordinator, Exact)
    # Rates were measured anew since: the plan of today fills the same slots, maybe with others.
    again = coordinator.plan(FleetProfiles.numbered(capacities, velocities)).quotas
    np.testing.assert_array_equal(again.sum(axis=1), capacities)
