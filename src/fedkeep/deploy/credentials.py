"""The keys of a fleet: one CA, one server certificate, one ECDSA P-384 key per node, and those of a key-holder."""

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedkeep.core.errors import ConfigError, needing
from fedkeep.files import writing
from fedkeep.keyholder.port import KEYHOLDER, PLANNER

with needing("fedkeep.flower", "flower"):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

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
    key, name = ec.generate_private_key(ec.SECP384R1()), _name("fedkeep fleet CA")
    known = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = _certificate(name, key.public_key(), name, key, 5 * days, [known], authority=True)
    _write(credentials.ca_key, _private_pem(key), 0o600)
    _write(credentials.ca_certificate, certificate, 0o644)


def _issue(
    credentials: Credentials, *, hosts: Sequence[str], name: str, usage: x509.ObjectIdentifier, days: int, to: str
) -> None:
    """Writes `to`.crt and `to`.key: a fresh key, and the CA's word that it is `name` at these hosts."""
    ca_key = serialization.load_pem_private_key(credentials.ca_key.read_bytes(), password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{credentials.ca_key} is not an elliptic-curve key: provision into an empty directory")
    ca = x509.load_pem_x509_certificate(credentials.ca_certificate.read_bytes())
    key = ec.generate_private_key(ec.SECP384R1())
    said: list[x509.ExtensionType] = [
        x509.ExtendedKeyUsage([usage]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
    ]
    if hosts:
        said.append(x509.SubjectAlternativeName([_alternative(host) for host in hosts]))
    _write(credentials.root / f"{to}.key", _private_pem(key), 0o600)
    certificate = _certificate(_name(name), key.public_key(), ca.subject, ca_key, days, said, authority=False)
    _write(credentials.root / f"{to}.crt", certificate, 0o644)


def _make_node(credentials: Credentials, node: str) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(credentials.node_key(node), private, 0o600)
    _write(credentials.node_public_key(node), public + b"\n", 0o644)


def _certificate(
    subject: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
    said: Iterable[x509.ExtensionType],
    *,
    authority: bool,
) -> bytes:
    """A certificate valid from a day ago, so that a device with a slow clock still trusts it."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
    )
    # It signs, and a CA signs certificates and lists of revoked ones, the sixth and the seventh; nothing else.
    usage = x509.KeyUsage(True, False, False, False, False, authority, authority, False, False)
    builder = builder.add_extension(usage, critical=True)
    for extension in said:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a file that never exists with wider rights or half its content."""
    with writing(path, mode) as file:
        file.write(content)
