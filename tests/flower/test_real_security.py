"""A real SuperLink as `fedkeep provision` sets it up refuses nodes without a key of their own."""

import datetime
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedkeep.core.errors import FedkeepError
from fedkeep.deploy.credentials import provision
from fedkeep.deploy.deployment import Deployment
from tests.flower.real_fleet import RealFleet

pytestmark = pytest.mark.real

Key = ec.EllipticCurvePrivateKey


class Signing:
    """Signs requests as a SuperNode does, or as somebody who would like to be one."""

    def __init__(self, key: Key, *, age: float = 0.0, tampered: bool = False) -> None:
        self._key, self._age, self._tampered = key, age, tampered

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        when = (
            datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=self._age)
        ).isoformat()
        signature = sign_message(self._key, when.encode())
        said = when.replace("+00:00", "000+00:00") if self._tampered else when
        public = b64encode(public_key_to_bytes(self._key.public_key())).decode()
        context.request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER] = public
        context.request.headers[TIMESTAMP_HEADER] = said
        context.request.headers[FLEET_HTTP_SIGNATURE_HEADER] = b64encode(signature).decode()
        return call_next(context)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with RealFleet.private(tmp_path_factory.mktemp("fleet"), nodes=2) as fleet:
        fleet.start_superlink()
        fleet.register()
        yield fleet


def client(fleet: RealFleet, signing: Signing, ca: Path | None = None) -> FleetHttpClient:
    interceptors = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), signing]
    trusted = (ca or fleet.deployment.credentials.ca_certificate).read_bytes()
    return FleetHttpClient.from_server_address(
        fleet.deployment.address, False, trusted, interceptors
    )


def key_of(fleet: RealFleet, node: str) -> Key:
    path = fleet.deployment.credentials.node_key(node)
    key = load_ssh_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def activate(
    fleet: RealFleet, key: Key, signing: Signing | None = None, ca: Path | None = None
) -> int:
    public = public_key_to_bytes(key.public_key())
    with client(fleet, signing or Signing(key), ca) as link:
        return link.ActivateNode(
            ActivateNodeRequest(public_key=public, heartbeat_interval=30)
        ).node_id


def test_a_registered_key_is_let_in_and_keeps_its_identity(fleet: RealFleet) -> None:
    key = key_of(fleet, "node-0")
    first = activate(fleet, key)
    with client(fleet, Signing(key)) as link:
        link.DeactivateNode(DeactivateNodeRequest(node_id=first))
    assert first == activate(fleet, key)


def test_an_unknown_key_is_refused(fleet: RealFleet) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="4"):
        activate(fleet, ec.generate_private_key(ec.SECP384R1()))


def test_a_node_without_a_registered_key_cannot_register_itself(fleet: RealFleet) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    public = public_key_to_bytes(key.public_key())
    with client(fleet, Signing(key)) as link, pytest.raises(httpx.HTTPStatusError):
        link.RegisterNode(RegisterNodeFleetRequest(public_key=public))
    with pytest.raises(httpx.HTTPStatusError):
        activate(fleet, key)


def test_a_server_of_another_ca_is_not_trusted(fleet: RealFleet, tmp_path: Path) -> None:
    other = provision(tmp_path / "other", ["127.0.0.1"], [])
    with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
        activate(fleet, key_of(fleet, "node-0"), ca=other.ca_certificate)


def test_a_replayed_request_is_refused(fleet: RealFleet) -> None:
    key = key_of(fleet, "node-0")
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        activate(fleet, key, Signing(key, age=3600))


def test_a_tampered_signature_is_refused(fleet: RealFleet) -> None:
    key = key_of(fleet, "node-0")
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        activate(fleet, key, Signing(key, tampered=True))


def test_a_node_cannot_read_another_nodes_messages(fleet: RealFleet) -> None:
    victim = activate(fleet, key_of(fleet, "node-1"))
    request = PullMessagesRequest(node=Node(node_id=victim))
    with (
        client(fleet, Signing(key_of(fleet, "node-0"))) as link,
        pytest.raises(httpx.HTTPStatusError, match="401"),
    ):
        link.PullMessages(request)


def test_plain_http_is_not_answered(fleet: RealFleet) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{fleet.deployment.address}/", timeout=5, trust_env=False)


def test_a_taken_port_is_said_by_its_address(fleet: RealFleet) -> None:
    taken = fleet.deployment
    second = RealFleet(Deployment(taken.root, taken.host, taken.port))
    with second, pytest.raises(FedkeepError, match=taken.address):
        second.start_superlink()
