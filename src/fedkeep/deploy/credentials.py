"""The keys of a fleet: a CA, a server certificate, an ECDSA P-384 key per node, a key-holder's."""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedkeep.core.errors import ConfigError, optional_import
from fedkeep.files import atomic_write
from fedkeep.keyholder.service import KEYHOLDER, PLANNER

with optional_import("fedkeep.flower", "flower"):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_HOST = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.:_*-]{0,62}[A-Za-z0-9:])?|::[0-9a-fA-F:]*")
"""A name that a certificate can carry, or an address."""
_LONGEST_DAYS = 36_500


class Credentials:
    """Where the files of a fleet lie; private keys are readable by their owner only."""

    def __init__(self, root: Path) -> None:
        self.root, self.ca_certificate = root, root / "ca.crt"

    def node_key(self, node: str) -> Path:
        """Return the path of a node's private key."""
        return self.root / "nodes" / node

    def nodes(self) -> list[str]:
        """Return the names of the nodes that have a public key here."""
        return sorted(path.stem for path in (self.root / "nodes").glob("*.pub"))


def provision(
    root: Path,
    hosts: Iterable[str],
    nodes: Iterable[str],
    days: int = 825,
    keyholder_hosts: Iterable[str] = (),
) -> Credentials:
    """Create whatever is missing of a fleet's credentials, and renew the server's certificate.

    CA and node keys that exist are kept, so that running it again adds nodes without changing any
    identity.

    Parameters
    ----------
    root : Path
        The folder of the credentials, readable by its owner only.
    hosts : iterable of str
        The names and addresses by which devices reach the server, at least one.
    nodes : iterable of str
        The nodes that get a key unless they have one.
    days : int
        How long the certificates are valid; the CA five times as long.
    keyholder_hosts : iterable of str
        With any, key-holder and server get certificates by which they know each other.

    Returns
    -------
    Credentials

    Raises
    ------
    ConfigError
        If no host is named, or the folder has a CA with a key of another kind.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> made = provision(Path(mkdtemp()), ["fleet.example"], ["node-0", "node-1"])
    >>> made.nodes(), oct(made.node_key("node-0").stat().st_mode & 0o777)
    (['node-0', 'node-1'], '0o600')
    """
    names, keyholders = list(hosts), list(keyholder_hosts)
    if not names:
        raise ConfigError("name at least one host by which the devices reach the server")
    if wrong := [host for host in (*names, *keyholders) if not _HOST.fullmatch(host)]:
        raise ConfigError(f"a host is a name or an address such as fleet.example, got {wrong[0]!r}")
    if days > _LONGEST_DAYS:
        raise ConfigError(f"certificates can be valid for at most {_LONGEST_DAYS} days, got {days}")
    credentials = Credentials(root)
    (root / "nodes").mkdir(parents=True, exist_ok=True)
    root.chmod(0o700)
    if not (root / "ca.key").exists():
        _issue(root, "ca", "fedkeep fleet CA", (), None, 5 * days)
    server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    _issue(root, "server", names[0], names, server, days)
    if keyholders:
        _issue(root, "keyholder", KEYHOLDER, keyholders, server, days)
        _issue(root, "planner", PLANNER, (), client, days)
    for node in nodes:
        if not credentials.node_key(node).exists():
            key, form = ec.generate_private_key(ec.SECP384R1()), serialization.PublicFormat.OpenSSH
            public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, form)
            _write(
                credentials.node_key(node),
                _private(key, serialization.PrivateFormat.OpenSSH),
                0o600,
            )
            _write(credentials.node_key(f"{node}.pub"), public + b"\n", 0o644)
    return credentials


def _issue(
    root: Path,
    to: str,
    name: str,
    hosts: Sequence[str],
    usage: x509.ObjectIdentifier | None,
    days: int,
) -> None:
    """Write `to`.crt and `to`.key: a fresh key, certified by the CA as `name` at these hosts.

    Without a usage it is the CA itself, self-signed.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    ca_key, issuer, extensions = key, subject, list[x509.ExtensionType]()
    if usage is None:
        extensions += [x509.SubjectKeyIdentifier.from_public_key(key.public_key())]
    else:
        loaded = serialization.load_pem_private_key((root / "ca.key").read_bytes(), password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                f"{root}/ca.key is not an elliptic-curve key: provision into an empty directory"
            )
        ca_key, issuer = (
            loaded,
            x509.load_pem_x509_certificate((root / "ca.crt").read_bytes()).subject,
        )
        known = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        extensions += [x509.ExtendedKeyUsage([usage]), known]
    if hosts:
        extensions.append(x509.SubjectAlternativeName([_alternative(host) for host in hosts]))
    now, authority = datetime.now(UTC), usage is None
    # Every key signs; the CA also signs certificates and revocation lists (the sixth and seventh).
    signs = x509.KeyUsage(True, False, False, False, False, authority, authority, False, False)
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # a device with a slow clock still trusts it
        .not_valid_after(now + timedelta(days=days))
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
        )
        .add_extension(signs, critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(ca_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
    _write(root / f"{to}.key", _private(key, serialization.PrivateFormat.PKCS8), 0o600)
    _write(root / f"{to}.crt", certificate, 0o644)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file that never exists with wider rights or half its content."""
    with atomic_write(path, mode) as file:
        file.write(content)
