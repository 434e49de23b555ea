"""The files in deploy/ say what `fedkeep provision` says, and their tools accept them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from fedkeep.flower.deployment import Deployment

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = ("fedkeep-server.service", "flower-superlink.service", "flower-supernode.service")


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
