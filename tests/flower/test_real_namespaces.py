"""Server and devices in network namespaces of their own: a cut link heals, identities stay."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flwr.app.user_config import UserConfig

from fedkeep.sim.engine import Simulator
from tests.flower.real_fleet import APP, RealFleet, app_config, saved_round, wait_until

pytestmark = pytest.mark.real

NODES, ROUNDS = 2, 3


@dataclass(frozen=True)
class Network:
    """A pair of linked interfaces: one here for the server, one in a namespace for the devices."""

    name: str
    server: str

    @property
    def within(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def set_link(self, state: str) -> None:
        _ip("link", "set", f"{self.name}s", state)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces takes root and `ip`")
    name, subnet = f"fk{os.getpid() % 10000}", f"10.231.{os.getpid() % 200}"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine allows no network namespaces: {error.stderr.decode().strip()}")
    try:
        _ip("link", "add", f"{name}s", "type", "veth", "peer", "name", f"{name}d", "netns", name)
        _ip("addr", "add", f"{subnet}.1/24", "dev", f"{name}s")
        _ip("link", "set", f"{name}s", "up")
        for words in (
            ("addr", "add", f"{subnet}.2/24", "dev", f"{name}d"),
            ("link", "set", f"{name}d", "up"),
        ):
            _ip("-n", name, *words)
        _ip("-n", name, "link", "set", "lo", "up")
        yield Network(name, f"{subnet}.1")
    finally:
        _ip("netns", "del", name)


def test_a_cut_link_heals_and_the_run_ends_as_if_nothing_had_been(
    network: Network, tmp_path: Path
) -> None:
    from fedkeep_app.task import experiment_of

    state, output = tmp_path / "state.db", tmp_path / "model.npy"
    settings: UserConfig = {
        "task.devices": NODES,
        "train.rounds": ROUNDS,
        "train.participation": 1.0,
    }
    settings |= {"rounds.deterministic": True, "rounds.min-devices": NODES}
    with RealFleet.private(tmp_path / "fleet", NODES, host=network.server) as fleet:
        fleet.start_superlink()
        fleet.register()
        for number in range(NODES):
            node = {"device": number, "state-dir": str(tmp_path / "devices")}
            fleet.start_node(number, node, network.within)
        fleet.submit(APP, {**settings, "state.url": str(state), "output": str(output)})
        wait_until(lambda: saved_round(state) >= 1, 180, "the first round")
        network.set_link("down")
        time.sleep(8)
        assert saved_round(state) < ROUNDS
        network.set_link("up")
        wait_until(partial(_ended, fleet, output), 300, "the end of the run")
        identities = [
            set(re.findall(r"SuperNode ID: (\d+)", fleet.log(f"node-{n}"))) for n in range(NODES)
        ]
    assert [len(known) for known in identities] == [1] * NODES
    simulator = Simulator(experiment_of({**app_config(), **settings}))
    list(simulator.run())
    assert np.abs(np.load(output) - simulator.server.model).max() < 1e-6


def _ended(fleet: RealFleet, output: Path) -> bool:
    fleet.revive_nodes()
    return output.exists()
