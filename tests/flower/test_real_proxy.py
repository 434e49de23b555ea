"""deploy/nginx-fleet.conf before a real SuperLink: devices reach only the FleetProfiles API."""

import os
import re
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedkeep.deploy.deployment import Deployment
from fedkeep.deploy.local_fleet import free_port
from tests.flower.real_fleet import RealFleet, wait_until
from tests.flower.wire_node import wire_node

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(NGINX is None, reason="no nginx on this machine"),
]

CONF = Path(__file__).parents[2] / "deploy" / "nginx-fleet.conf"


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    """A fleet whose address is the proxy's; its SuperLink listens behind it."""
    root = tmp_path_factory.mktemp("proxied")
    with RealFleet.private(root / "fleet", nodes=1) as fleet:
        fleet.start_superlink()
        fleet.register()
        front = free_port()
        conf = CONF.read_text().replace("/var/lib/fedkeep-server/fleet", str(fleet.deployment.root))
        conf = conf.replace("listen 8443", f"listen 127.0.0.1:{front}").replace(
            "fleet.example", "localhost"
        )
        conf = conf.replace("127.0.0.1:8000", fleet.deployment.address)
        assert "client_max_body_size 8m;" in conf
        (root / "nginx.conf").write_text(
            re.sub(r"^http \{", f"http {{\n{temporary(root)}", conf, flags=re.M)
        )
        user = (
            "user root;" if os.geteuid() == 0 else ""
        )  # else its workers could not read what root made for them
        setup = f"daemon off; pid {root}/nginx.pid; error_log stderr; {user}"
        fleet.start(
            "nginx", [str(NGINX), "-p", str(root), "-c", str(root / "nginx.conf"), "-g", setup]
        )
        wait_until(lambda: _answers(fleet, front), 120, f"nginx: {fleet.log('nginx')}")
        yield RealFleet(Deployment(fleet.deployment.root, "127.0.0.1", front))


def temporary(root: Path) -> str:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return "".join(f"  {kind}_temp_path {root}/{kind};\n" for kind in kinds) + "  access_log off;\n"


def _answers(fleet: RealFleet, port: int) -> bool:
    try:
        ask(fleet, port, "/")
    except httpx.TransportError:
        return False
    return True


def ask(fleet: RealFleet, port: int, path: str, size: int = 0) -> httpx.Response:
    trusted = ssl.create_default_context(cafile=str(fleet.deployment.credentials.ca_certificate))
    url = f"https://127.0.0.1:{port}{path}"
    return httpx.post(url, content=bytes(size), verify=trusted, trust_env=False, timeout=30)


def test_a_device_joins_through_the_proxy(proxied: RealFleet) -> None:
    key = load_ssh_private_key(proxied.deployment.credentials.node_key("node-0").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    with wire_node(proxied, key) as node:
        assert node.node_id > 0


@pytest.mark.parametrize("path", ["/v1/control/list-runs", "/v1/runtime/push-task-output", "/"])
def test_nothing_but_the_fleet_api_is_reached(proxied: RealFleet, path: str) -> None:
    assert ask(proxied, proxied.deployment.port, path).status_code == 403


def test_a_request_larger_than_the_limit_is_refused_unread(proxied: RealFleet) -> None:
    port, path = proxied.deployment.port, "/v1/fleet/push-object"
    assert ask(proxied, port, path, size=9 * 2**20).status_code == 413
    assert ask(proxied, port, path, size=7 * 2**20).status_code == 415, (
        "as far as the SuperLink, which cannot read it"
    )
