"""Profiles sealed to the key-holder: whoever relays one can neither read nor alter it, nor use it twice or for another.

A fresh X25519 key for each message, HKDF-SHA256 and ChaCha20-Poly1305, all of `cryptography`. Key, nonce and device are
bound to the seal: it opens for the key-holder alone, for the device that made it, and until another nonce is given out.
"""

import shutil
from pathlib import Path

from fedkeep.core.errors import ConfigError, RefusedError, needing
from fedkeep.core.screening import screen_profile
from fedkeep.core.types import DeviceId, Profile
from fedkeep.files import beside, put_in_place, writing
from fedkeep.link.messages import ProfileRequest
from fedkeep.link.wire import from_bytes, to_bytes

with needing("encrypted profiles", "privacy"):
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES, NONCE_BYTES = 32, 16
_FRAME_BYTES = 512
"""More than a sealed profile has besides its velocities."""
_MOST_SLOTS = 10**9
_ONCE = bytes(12)
"""The cipher's own nonce: every message has a key of its own."""


def seal(key: bytes, request: ProfileRequest, profile: Profile) -> bytes:
    """The device's part: seals to the key that it was given and to no other, or sends nothing."""
    if request.key != key:
        asked = f"asked for {request.key.hex()[: 2 * KEY_BYTES]}, given {key.hex()} by the key-holder"
        raise RefusedError("another key", f"{asked}: nothing was sent")
    if len(request.nonce) != NONCE_BYTES or request.device is None:
        raise RefusedError("profile request", "it lacks the key-holder's nonce or a device's number: nothing was sent")
    fresh = X25519PrivateKey.generate()
    start = fresh.public_key().public_bytes_raw()
    cipher = _cipher(fresh, key, start + key)
    return start + cipher.encrypt(_ONCE, to_bytes(profile), request.nonce + str(request.device).encode())


def unseal(secret: X25519PrivateKey, nonce: bytes, device: DeviceId, sealed: bytes, labels: int) -> Profile:
    """The key-holder's part: the device's profile, if the seal is whole and what is under it sound."""
    if len(sealed) > 8 * labels + _FRAME_BYTES:
        raise RefusedError("oversized", f"{len(sealed)} bytes are no sealed profile of {labels} labels")
    start, key = sealed[:KEY_BYTES], secret.public_key().public_bytes_raw()
    try:
        cipher = _cipher(secret, start, start + key)
        plain = cipher.decrypt(_ONCE, sealed[KEY_BYTES:], nonce + str(device).encode())
    except InvalidTag:
        why = "it was altered, or sealed by another device, to another key or for an earlier nonce"
        raise RefusedError("broken seal", why) from None
    profile = screen_profile(from_bytes(plain, Profile), labels)
    if not 1 <= profile.capacity <= _MOST_SLOTS:
        raise RefusedError("bad-capacity", f"{profile.capacity} is not a number from 1 to {_MOST_SLOTS}")
    return profile


def _cipher(own: X25519PrivateKey, peer: bytes, keys: bytes) -> ChaCha20Poly1305:
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError as error:
        raise RefusedError("unusable public key", str(error)) from error
    return ChaCha20Poly1305(HKDF(SHA256(), 32, salt=None, info=b"fedkeep sealed profile" + keys).derive(shared))


def read_public_key(text: str) -> bytes:
    """The key-holder's public key as a device's configuration has it."""
    if not text:
        raise ConfigError(
            "privacy.encrypted_profiles needs privacy.public_key: the key-holder's, as `fedkeep keyholder show` says"
        )
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"privacy.public_key must be {2 * KEY_BYTES} hexadecimal digits, got '{text[:80]}'")
    return key


class KeyDirectory:
    """A directory with `secret.key`, which never leaves it, and `public.key`, in the digits that devices are given."""

    def __init__(self, root: Path) -> None:
        self.root, self._secret, self._public = root, root / "secret.key", root / "public.key"

    def create(self) -> bytes:
        """Makes fresh keys, both files or none; keys that exist are never overwritten, for nothing replaces them."""
        if self.root.exists() and any(self.root.iterdir()):
            raise ConfigError(f"{self.root} is not empty: keep the keys that are there, or name another directory")
        secret, partial = X25519PrivateKey.generate(), beside(self.root)
        public = secret.public_key().public_bytes_raw()
        pem, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        with writing(partial / self._secret.name, 0o600) as file:
            file.write(secret.private_bytes(pem, kind, serialization.NoEncryption()))
        with writing(partial / self._public.name) as file:
            file.write(public.hex().encode() + b"\n")
        put_in_place(partial, self.root)
        return public

    def public(self) -> bytes:
        """The public key, for devices."""
        if not self._public.exists():
            raise ConfigError(f"there are no keys in {self.root}: run `fedkeep keyholder create {self.root}` first")
        try:
            return read_public_key(self._public.read_text(errors="replace").strip())
        except ConfigError:
            raise RefusedError("damaged key", f"{self._public} holds no public key: put it back") from None

    def open(self) -> X25519PrivateKey:
        """The secret key, if it is there, whole, and that of the public one."""
        public = self.public()
        try:
            secret = serialization.load_pem_private_key(self._secret.read_bytes(), password=None)
        except FileNotFoundError:
            why = f"{self._secret} is gone: create new keys, and give every device the new public key"
            raise RefusedError("lost key", why) from None
        except ValueError:
            raise RefusedError(
                "damaged key", f"{self._secret} cannot be read: put it back, or create new keys"
            ) from None
        if not isinstance(secret, X25519PrivateKey) or secret.public_key().public_bytes_raw() != public:
            raise RefusedError("wrong key", f"{self._secret} is not that of {self._public}: put the right one back")
        return secret
