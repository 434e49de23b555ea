"""A first fleet's folder: what is written fits together, and only what was started is stopped."""

import json
import os
from pathlib import Path

import pytest

from fedkeep.agent.assembly import read_config
from fedkeep.config.method import parse_fleet
from fedkeep.core.errors import ConfigError
from fedkeep.deploy.first_fleet import FirstFleet
from fedkeep.tables import read_toml


def test_specification_and_devices_fit_each_other(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    spec = parse_fleet(read_toml(fleet.root / "fleet.toml"))
    agents = [read_config(fleet.home(number) / "agent.toml") for number in fleet.devices()]
    assert fleet.devices() == [0, 1]
    for agent in agents:
        assert (agent.samples.shape, agent.samples.labels) == (
            spec.samples.shape,
            spec.samples.labels,
        )
        assert (agent.model, agent.method.policy, agent.preset) == (
            spec.model,
            spec.policy,
            spec.preset,
        )
    assert len({agent.agent.socket for agent in agents}) == 2


def test_init_again_adds_devices_and_changes_nothing_else(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    (fleet.root / "fleet.toml").write_text("# mine")
    key = (fleet.root / "nodes" / "node-0").read_bytes()
    fleet.create(3)
    assert (fleet.root / "fleet.toml").read_text() == "# mine"
    assert (fleet.root / "nodes" / "node-0").read_bytes() == key
    assert fleet.devices() == [0, 1, 2]


def test_a_number_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path)
    fleet.create(2)
    (tmp_path / "processes.json").write_text(json.dumps({"fleet": [os.getpid(), 1]}))
    assert fleet.running() == {}
    assert not fleet.stop()


def test_mistakes_are_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fedkeep fleet init"):
        FirstFleet(tmp_path).start(1, 2)
    with pytest.raises(ConfigError, match="there is no fleet in"):
        FirstFleet(tmp_path).stop()
    with pytest.raises(ConfigError, match="too long a path"):
        FirstFleet(tmp_path / ("x" * 120)).create(2)
