"""One command makes a fleet's keys; running it again changes no identity."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedkeep.core.errors import ConfigError
from fedkeep.deploy.credentials import provision
from fedkeep.deploy.deployment import Deployment


def test_the_server_certificate_is_signed_for_its_hosts(tmp_path: Path) -> None:
    made = provision(tmp_path, ["fleet.example", "192.0.2.7"], [])
    ca = x509.load_pem_x509_certificate(made.ca_certificate.read_bytes())
    server = x509.load_pem_x509_certificate((made.root / "server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fleet.example"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7"]


def test_node_keys_are_p384_and_match(tmp_path: Path) -> None:
    made = provision(tmp_path, ["h"], ["node-0"])
    private = load_ssh_private_key(made.node_key("node-0").read_bytes(), password=None)
    public = load_ssh_public_key(made.node_key("node-0.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


def test_private_keys_are_their_owners(tmp_path: Path) -> None:
    made = provision(tmp_path / "keys", ["h"], ["node-0"])
    private = [made.root / "ca.key", made.root / "server.key", made.node_key("node-0")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o600] * 3
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_a_key_holder_and_the_server_get_certificates_for_one_purpose_each(tmp_path: Path) -> None:
    made = provision(tmp_path, ["h"], [], keyholder_hosts=["keys.example"])
    ca = x509.load_pem_x509_certificate(made.ca_certificate.read_bytes())
    purposes = {}
    for path in (made.root / "keyholder.crt", made.root / "planner.crt"):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        certificate.verify_directly_issued_by(ca)
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        purposes[certificate.subject.rfc4514_string()] = list(usage)
    assert purposes == {
        "CN=fedkeep key-holder": [ExtendedKeyUsageOID.SERVER_AUTH],
        "CN=fedkeep planner": [ExtendedKeyUsageOID.CLIENT_AUTH],
    }
    private = (made.root / "keyholder.key", made.root / "planner.key")
    assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o600] * 2
    assert not (provision(tmp_path / "without", ["h"], []).root / "keyholder.crt").exists()


def test_again_adds_nodes_and_keeps_identities(tmp_path: Path) -> None:
    first = provision(tmp_path, ["h"], ["node-0"])
    before = [path.read_bytes() for path in (first.ca_certificate, first.node_key("node-0"))]
    again = provision(tmp_path, ["h"], ["node-0", "node-1"])
    assert [
        path.read_bytes() for path in (again.ca_certificate, again.node_key("node-0"))
    ] == before
    assert again.nodes() == ["node-0", "node-1"]


def test_the_printed_lines_are_secure(tmp_path: Path) -> None:
    provision(tmp_path, ["h"], ["node-0"])
    lines = Deployment(tmp_path, "h").instructions(["node-0"])
    superlink = next(line for line in lines.splitlines() if line.startswith("flower-superlink"))
    supernode = next(line for line in lines.splitlines() if line.startswith("flower-supernode"))
    assert "--enable-supernode-auth" in superlink
    assert "--disable-runtime-dependency-installation" in superlink
    assert "--ssl-keyfile" in superlink
    assert "--auth-supernode-private-key" in supernode
    assert "--root-certificates" in supernode
    assert "--allow-runtime-dependency-installation" not in lines
    assert "insecure" not in lines


def test_the_printed_lines_lead_from_the_server_to_a_run(tmp_path: Path) -> None:
    provision(tmp_path, ["h"], ["node-0"])
    far, near = (
        Deployment(tmp_path, host).instructions(["node-0"])
        for host in ("fleet.example", "127.0.0.1")
    )
    programs = [line.split()[0] for line in far.splitlines() if line and not line.startswith("#")]
    assert programs == ["export", "flower-superlink", "flwr", "export", "flower-supernode", "flwr"]
    assert "--root-certificates ca.crt --auth-supernode-private-key node-0" in far, (
        "as the device has them"
    )
    assert f"--root-certificates {tmp_path}/ca.crt" in near, "as they lie on this machine"
    assert far.splitlines()[-1].startswith("flwr run . fedkeep --run-config 'state.url=")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "fleet.example", "::"])
def test_insecure_is_for_loopback_only(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="loopback only"):
        Deployment(tmp_path, host, insecure=True)
    with pytest.raises(ConfigError, match="loopback only"):
        Deployment(tmp_path, "127.0.0.1", insecure=True, bind=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_insecure_on_loopback_by_an_explicit_flag(tmp_path: Path, host: str) -> None:
    assert "--insecure" in Deployment(tmp_path, host, insecure=True).superlink()
    assert "--insecure" not in Deployment(tmp_path, host).superlink()
