"""Keys for a secure sum, signed by the devices' own node keys, so that a server cannot invent members.

`members` and each node's key come from whoever provisions the fleet (`fedkeep provision`), never from the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedkeep.core.errors import ConfigError, MissingExtraError, RefusedError
from fedkeep.core.types import DeviceId
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.secure_sum import PublicKeys

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA384
except ImportError as error:  # pragma: no cover - needs an install without the extra
    raise MissingExtraError("secure aggregation", "privacy") from error

_SIGNED = ec.ECDSA(SHA384())


class MemberKeys:
    """A device's node key, and the public keys of all devices that may be in a sum with it."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, members: frozenset[bytes]) -> None:
        self._key, self._members = key, members
        self._name = _told(key.public_key())
        if self._name not in members:
            raise ConfigError("privacy.member_key is not among privacy.members: both come from `fedkeep provision`")

    def sign(self, keys: PublicKeys, session: bytes, device: DeviceId) -> PublicKeys:
        """The keys with this member's word that they are its own, for this sum and under this number."""
        return replace(keys, member=self._name, signature=self._key.sign(_statement(keys, session, device), _SIGNED))

    def require_members(self, roster: Mapping[DeviceId, PublicKeys], session: bytes) -> None:
        """Raises where a key of the roster is not a registered member's, or one member stands in it twice."""
        for device, keys in roster.items():
            if keys.member not in self._members or not _holds(keys, session, device):
                raise RefusedError("not a member", f"device {device} is none that this fleet knows: nothing was sent")
        if len({keys.member for keys in roster.values()}) < len(roster):
            raise RefusedError("twice in the sum", "one member stands under two numbers: nothing was sent")


def member_keys(options: PrivacyOptions) -> MemberKeys | None:
    """The keys that the options name; None where a device believes the server who is in a sum."""
    if not options.members:
        return None
    try:
        key = serialization.load_ssh_private_key(Path(options.member_key).read_bytes(), password=None)
        files = sorted(Path(options.members).glob("*.pub"))
        members = frozenset(_told(serialization.load_ssh_public_key(file.read_bytes())) for file in files)
    except (OSError, ValueError) as error:
        raise ConfigError(f"privacy.member_key and privacy.members cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{options.member_key} is no elliptic-curve key: use the one of `fedkeep provision`")
    return MemberKeys(key, members)


def _holds(keys: PublicKeys, session: bytes, device: DeviceId) -> bool:
    public = serialization.load_ssh_public_key(keys.member)
    if not isinstance(public, ec.EllipticCurvePublicKey):
        return False
    try:
        public.verify(keys.signature, _statement(keys, session, device), _SIGNED)
    except InvalidSignature:
        return False
    return True


def _statement(keys: PublicKeys, session: bytes, device: DeviceId) -> bytes:
    parts = (b"fedkeep secure sum", session, str(device).encode(), keys.masking, keys.sealing, keys.own_mask)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _told(public: object) -> bytes:
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise ValueError("a member's key is no elliptic-curve key")
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
