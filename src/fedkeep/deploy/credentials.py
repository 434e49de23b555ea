"""The keys of a fleet: one CA, one server certificate, one ECDSA P-384 key per node, and those of a key-holder."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedkeep.core.errors import ConfigError, MissingExtraError
from fedkeep.keyholder.mutual_tls import KEYHOLDER, PLANNER

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:  # pragma: no cover - needs an install without the extra
    raise MissingExtraError("fedkeep.flower", "flower") from missing

_SERVER, _KEYHOLDER, _PLANNER = "server", "keyholder", "planner"
_CLOCK_SKEW = datetime.timedelta(hours=24)


@dataclass(frozen=True)
class Credentials:
    """Where the files of a fleet lie; private keys are readable by their owner only."""

    root: Path

    @property
    def ca_certificate(self) -> Path:
        return self.root / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.root / "ca.key"

    @property
    def server_certificate(self) -> Path:
        return self.root / "server.crt"

    @property
    def server_key(self) -> Path:
        return self.root / "server.key"

    def node_key(self, node: str) -> Path:
        return self.root / "nodes" / node

    def node_public_key(self, node: str) -> Path:
        return self.root / "nodes" / f"{node}.pub"

    def nodes(self) -> list[str]:
        """The names of all nodes that have a key here."""
        return sorted(path.stem for path in (self.root / "nodes").glob("*.pub"))


def provision(
    root: Path, hosts: Iterable[str], nodes: Iterable[str], days: int = 825, keyholder_hosts: Iterable[str] = ()
) -> Credentials:
    """Makes whatever is missing of a fleet's credentials under `root`, and renews the server's certificate.

    CA and node keys that exist are kept, so that running it again adds nodes without changing any identity. With
    hosts of a key-holder, it and the server get certificates by which they know each other.
    """
    names = list(hosts)
    if not names:
        raise ConfigError("name at least one host by which the devices reach the server")
    credentials = Credentials(root)
    (root / "nodes").mkdir(parents=True, exist_ok=True)
    root.chmod(0o700)
    if not credentials.ca_key.exists():
        _make_ca(credentials, days)
    _issue(credentials, hosts=names, name=names[0], usage=ExtendedKeyUsageOID.SERVER_AUTH, days=days, to=_SERVER)
    if keyholders := list(keyholder_hosts):
        server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
        _issue(credentials, hosts=keyholders, name=KEYHOLDER, usage=server, days=days, to=_KEYHOLDER)
        _issue(credentials, hosts=(), name=PLANNER, usage=client, days=days, to=_PLANNER)
    for node in nodes:
        if not credentials.node_key(node).exists():
            _make_node(credentials, node)
    return credentials


def _make_ca(credentials: Credentials, days: int) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedkeep fleet CA")
    builder = (
        _certificate(name, name, key.public_key(), 5 * days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    _write(credentials.ca_key, _private_pem(key), 0o600)
    _write(credentials.ca_certificate, _pem(builder.sign(key, hashes.SHA384())), 0o644)


def _issue(
    credentials: Credentials, *, hosts: Sequence[str], name: str, usage: x509.ObjectIdentifier, days: int, to: str
) -> None:
    """Writes `to`.crt and `to`.key: a fresh key, and the CA's word that it is `name` at these hosts."""
    ca_key = serialization.load_pem_private_key(credentials.ca_key.read_bytes(), password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{credentials.ca_key} is not an elliptic-curve key: provision into an empty directory")
    ca = x509.load_pem_x509_certificate(credentials.ca_certificate.read_bytes())
    key = ec.generate_private_key(ec.SECP384R1())
    builder = (
        _certificate(_name(name), ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if hosts:
        alternatives = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
        builder = builder.add_extension(alternatives, critical=False)
    _write(credentials.root / f"{to}.key", _private_pem(key), 0o600)
    _write(credentials.root / f"{to}.crt", _pem(builder.sign(ca_key, hashes.SHA384())), 0o644)


def _make_node(credentials: Credentials, node: str) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(credentials.node_key(node), private, 0o600)
    _write(credentials.node_public_key(node), public + b"\n", 0o644)


def _certificate(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    """A certificate valid from a day ago, so that a device with a slow clock still trusts it."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a file that never exists with wider rights or half its content."""
    partial = path.with_name(path.name + ".new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    partial.replace(path)
