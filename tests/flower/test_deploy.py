"""The files in deploy/ say what `fedkeep provision` says, and their tools accept them."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from flwr.common.config import flatten_dict

from fedkeep.config import read_toml
from fedkeep.core.errors import ConfigError
from fedkeep.deploy.deployment import Deployment
from fedkeep.fleet.specification import parse_fleet
from fedkeep.flower.server_app import fleet_of, write_app

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = ("fedkeep-server.service", "fedkeep-watch.service", "flower-superlink.service", "flower-supernode.service")


def _line(unit: str) -> str:
    text = (DEPLOY / unit).read_text().replace("\\\n", " ")
    return next(line for line in text.splitlines() if line.startswith("ExecStart="))


def test_the_superlink_unit_has_every_flag_that_provision_prints() -> None:
    printed = {word for word in Deployment(Path("/fleet"), "fleet.example").superlink() if word.startswith("--")}
    assert printed <= set(re.findall(r"--[a-z-]+", _line("flower-superlink.service")))


def test_the_supernode_unit_has_every_flag_that_provision_prints() -> None:
    command = Deployment(Path("/fleet"), "fleet.example").supernode("node-0", 9094, {"device": 0})
    printed = {word for word in command if word.startswith("--")}
    assert printed <= set(re.findall(r"--[a-z-]+", _line("flower-supernode.service")))


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on PATH")
    text = re.sub(r"/opt/fedkeep/venv/bin/[a-z-]+", "/bin/true", (DEPLOY / unit).read_text())
    (tmp_path / unit).write_text(text.replace("User=fedkeep", "User=root").replace("fedkeep-agent.service", ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit)], capture_output=True, text=True, check=False
    )
    assert unit not in done.stderr, done.stderr
    assert done.returncode == 0


def test_no_device_in_compose_sees_the_ca_key_or_anothers() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for number in (0, 1):
        mounts = " ".join(services[f"node-{number}"]["volumes"])
        assert f"nodes/node-{number}:" in mounts
        assert f"nodes/node-{1 - number}" not in mounts
        assert "ca.key" not in mounts
        assert "../fleet:" not in mounts
    assert all("--insecure" not in str(service.get("command")) for service in services.values())
    assert all(service.get("restart") == "unless-stopped" for service in services.values())


def test_a_specification_becomes_an_app_that_specifies_the_same_fleet(tmp_path: Path) -> None:
    specification = tmp_path / "fleet.toml"
    specification.write_text(
        '[samples]\nshape = [1, 8, 8]\nlabels = 3\n[model]\nname = "softmax"\n[train]\nrounds = 7\n'
    )
    app = write_app(specification, tmp_path / "app", {"rounds": {"min-devices": 2}, "state": {"run": "mine"}})
    config = flatten_dict(tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
    spec = fleet_of(config)
    assert (spec.samples.shape, spec.samples.labels, spec.train.rounds) == ((1, 8, 8), 3, 7)
    assert (spec.deployment["rounds"], spec.deployment["state"]["run"]) == ({"min_devices": 2}, "mine")
    assert spec.server().model.tobytes() == parse_fleet(read_toml(specification)).server().model.tobytes()
    specification.write_text("[samples]\nshape = [1]\nlabels = 3\n[tran]\nrounds = 7\n")
    with pytest.raises(ConfigError, match="unknown table 'tran': did you mean 'train'"):
        write_app(specification, tmp_path / "app", {})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[rounds]\nmin_devics = 2\n", "unknown key 'rounds.min_devics': did you mean 'min_devices'"),
        ("[rounds]\nparticipation = 0.5\n", "set 'train.participation'"),
        ("[state]\nresume = true\n", "needs 'state.url'"),
        ('[aggregation]\nname = "robust"\n[privacy]\nsecure_sum = true\n', "secure"),
    ],
)
def test_mistakes_of_a_specification_are_told_before_anything_starts(tmp_path: Path, wrong: str, said: str) -> None:
    specification = tmp_path / "fleet.toml"
    specification.write_text('[samples]\nshape = [8]\nlabels = 3\n[model]\nname = "softmax"\n' + wrong)
    with pytest.raises(ConfigError, match=said):
        write_app(specification, tmp_path / "app", {})
    assert not (tmp_path / "app").exists()
