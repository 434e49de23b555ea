"""The files in deploy/ say what `fedkeep provision` says, and their tools accept them."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from flwr.common.config import flatten_dict
from typer.testing import CliRunner

from fedkeep.cli.app import app as cli
from fedkeep.config.method import parse_fleet
from fedkeep.core.errors import ConfigError
from fedkeep.deploy.deployment import Deployment
from fedkeep.flower.server_app import fleet_of, make_app
from fedkeep.tables import read_toml

DEPLOY = Path(__file__).parents[2] / "deploy"
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app"
UNITS = (
    "fedkeep-server.service",
    "fedkeep-watch.service",
    "flower-superlink.service",
    "flower-supernode.service",
)


def _line(unit: str) -> str:
    text = (DEPLOY / unit).read_text().replace("\\\n", " ")
    return next(line for line in text.splitlines() if line.startswith("ExecStart="))


def test_the_superlink_unit_has_every_flag_that_provision_prints() -> None:
    printed = {
        word
        for word in Deployment(Path("/fleet"), "fleet.example").superlink()
        if word.startswith("--")
    }
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
    (tmp_path / unit).write_text(
        text.replace("User=fedkeep", "User=root").replace("fedkeep-agent.service", "")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit)],
        capture_output=True,
        text=True,
        check=False,
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
    changes = {"rounds": {"min-devices": 2}, "state": {"run": "mine"}}
    app, _ = make_app(specification, tmp_path / "app", changes, {})
    config = flatten_dict(
        tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    )
    spec = fleet_of(config)
    assert (spec.samples.shape, spec.samples.labels, spec.train.rounds) == ((1, 8, 8), 3, 7)
    assert (spec.deployment["rounds"], spec.deployment["state"]["run"]) == (
        {"min_devices": 2},
        "mine",
    )
    assert (
        spec.server().model.tobytes()
        == parse_fleet(read_toml(specification)).server().model.tobytes()
    )
    specification.write_text("[samples]\nshape = [1]\nlabels = 3\n[tran]\nrounds = 7\n")
    with pytest.raises(ConfigError, match="unknown table 'tran': did you mean 'train'"):
        make_app(specification, tmp_path / "app", {}, {})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "[rounds]\nmin_devics = 2\n",
            "unknown key 'rounds.min_devics': did you mean 'min_devices'",
        ),
        ("[rounds]\nparticipation = 0.5\n", "set 'train.participation'"),
        ("[state]\nresume = true\n", "needs 'state.url'"),
        ('[aggregation]\nname = "robust"\n[privacy]\nsecure_sum = true\n', "secure"),
    ],
)
def test_mistakes_of_a_specification_are_told_before_anything_starts(
    tmp_path: Path, wrong: str, said: str
) -> None:
    specification = tmp_path / "fleet.toml"
    specification.write_text(
        '[samples]\nshape = [8]\nlabels = 3\n[model]\nname = "softmax"\n' + wrong
    )
    with pytest.raises(ConfigError, match=said):
        make_app(specification, tmp_path / "app", {}, {})
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (
            "deadline = 60.0",
            "dedline = 60.0",
            "unknown key 'rounds.dedline': did you mean 'deadline'",
        ),
        ("deadline = 60.0", "deadline = -1.0", "deadline must be above 0"),
        ("deadline = 60.0", 'deadline = "soon"', "'rounds.deadline' cannot be 'soon'"),
        ('name = "softmax"', 'name = "sofmax"', "did you mean 'softmax'"),
        ('name = "ode"', 'name = "oed"', "did you mean 'ode'"),
        ('shape = "[30]"', 'shape = "[30"', r"'samples.shape' cannot be '\[30'"),
        (
            "[tool.flwr.app.config.state]",
            "[tool.flwr.app.config.stat]",
            "has no key 'state.resume'",
        ),
        ("[tool.flwr", "[tool.flwr", "has no key 'train.rouns': did you mean 'train.rounds'"),
    ],
)
def test_mistakes_of_an_app_are_told_before_anything_starts(
    tmp_path: Path, right: str, wrong: str, said: str
) -> None:
    app, keys = tmp_path / "app", tmp_path / "keys"
    shutil.copytree(EXAMPLE, app)
    (app / "pyproject.toml").write_text(
        (EXAMPLE / "pyproject.toml").read_text().replace(right, wrong)
    )
    setting = ["--set", "train.rouns=3"] if right == wrong else []
    error = (
        CliRunner()
        .invoke(cli, ["serve", str(app), "--credentials", str(keys), "--insecure", *setting])
        .exception
    )
    assert isinstance(error, ConfigError), error
    assert re.search(said, str(error))
    assert "\n" not in str(error)
    assert not keys.exists()


def test_an_app_without_mistakes_is_served_where_it_is(tmp_path: Path) -> None:
    ours = {
        "state": {"url": "s.db", "run": "default"},
        "records": {"directory": "here"},
        "unknown": {"key": 1},
    }
    app, config = make_app(EXAMPLE, tmp_path / "app", {"train": {"rounds": 2}}, ours)
    assert app == EXAMPLE
    assert not (tmp_path / "app").exists()
    expected = {
        "state.url": "s.db",
        "state.run": "default",
        "records.directory": "here",
        "train.rounds": 2,
    }
    assert config == expected


def test_tables_that_are_an_apps_own_are_not_ours_to_judge(tmp_path: Path) -> None:
    mine = (
        "[tool.flwr.app.config]\nrounds = 3\n"
        '[tool.flwr.app.config.state]\nurl = ""\nrun = ""\nresume = false\n'
    )
    (tmp_path / "pyproject.toml").write_text(mine)
    assert make_app(tmp_path, tmp_path / "app", {}, {"state": {"url": "s.db"}}) == (
        tmp_path,
        {"state.url": "s.db"},
    )
