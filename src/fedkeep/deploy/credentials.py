"""The keys of a fleet: one CA, one server certificate, one ECDSA P-384 key per node, and those of a key-holder."""

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedkeep.core.errors import ConfigError, needing
from fedkeep.files import writing
from fedkeep.keyholder.planner import KEYHOLDER, PLANNER

with needing("fedkeep.flower", "flower"):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CLOCK_SKEW = datetime.timedelta(hours=24)


class Credentials:
    """Where the files of a fleet lie; private keys are readable by their owner only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ca_certificate, self.ca_key = root / "ca.crt", root / "ca.key"
        self.server_certificate, self.server_key = root / "server.crt", root / "server.key"

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

    >>> from tempfile import mkdtemp
    >>> made = provision(Path(mkdtemp()), ["fleet.example"], ["node-0", "node-1"])
    >>> made.nodes(), oct(made.node_key("node-0").stat().st_mode & 0o777)
    (['node-0', 'node-1'], '0o600')
    """
    names = list(hosts)
    if not names:
        raise ConfigError("name at least one host by which the devices reach the server")
    credentials = Credentials(root)
    (root / "nodes").mkdir(parents=True, exist_ok=True)
    root.chmod(0o700)
    if not credentials.ca_key.exists():
        _make_ca(credentials, days)
    server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    _issue(credentials, "server", names[0], names, server, days)
    if keyholders := list(keyholder_hosts):
        _issue(credentials, "keyholder", KEYHOLDER, keyholders, server, days)
        _issue(credentials, "planner", PLANNER, (), client, days)
    for node in nodes:
        if not credentials.node_key(node).exists():
            _make_node(credentials, node)
    return credentials


def _make_ca(credentials: Credentials, days: int) -> None:
    key, name = ec.generate_private_key(ec.SECP384R1()), _name("fedkeep fleet CA")
    known = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = _certificate(name, key, name, key, 5 * days, [known], authority=True)
    _write_pair(credentials.root, "ca", key, certificate)


def _issue(
    credentials: Credentials, to: str, name: str, hosts: Sequence[str], usage: x509.ObjectIdentifier, days: int
) -> None:
    """Writes `to`.crt and `to`.key: a fresh key, and the CA's word that it is `name` at these hosts."""
    ca_key = serialization.load_pem_private_key(credentials.ca_key.read_bytes(), password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{credentials.ca_key} is not an elliptic-curve key: provision into an empty directory")
    ca = x509.load_pem_x509_certificate(credentials.ca_certificate.read_bytes())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    said: list[x509.ExtensionType] = [x509.ExtendedKeyUsage([usage]), issuer]
    if hosts:
        said.append(x509.SubjectAlternativeName([_alternative(host) for host in hosts]))
    key = ec.generate_private_key(ec.SECP384R1())
    _write_pair(credentials.root, to, key, _certificate(_name(name), key, ca.subject, ca_key, days, said))


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
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
    said: Iterable[x509.ExtensionType],
    authority: bool = False,
) -> x509.Certificate:
    """A certificate valid from a day ago, so that a device with a slow clock still trusts it."""
    now = datetime.datetime.now(datetime.UTC)
    # It signs, and a CA signs certificates and lists of revoked ones, the sixth and the seventh; nothing else.
    usage = x509.KeyUsage(True, False, False, False, False, authority, authority, False, False)
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in said:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA384())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_pair(root: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    _write(root / f"{name}.key", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), 0o600)
    _write(root / f"{name}.crt", certificate.public_bytes(pem), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a file that never exists with wider rights or half its content."""
    with writing(path, mode) as file:
        file.write(content)
