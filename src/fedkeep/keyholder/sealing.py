"""Profiles sealed to the key-holder.

Whoever relays one can neither read nor alter it, nor use it twice or for another.

A fresh X25519 key for each message, HKDF-SHA256 and ChaCha20-Poly1305, all of `cryptography`. Key,
nonce and device are bound to the seal: it opens for the key-holder alone, for the device that made
it, and until another nonce is given out.
"""

from pathlib import Path

from fedkeep.core.errors import ConfigError, RejectedError, optional_import
from fedkeep.core.screening import screen_profile
from fedkeep.core.types import DeviceId, Profile
from fedkeep.files import atomic_write
from fedkeep.protocol.messages import ProfileRequest
from fedkeep.protocol.wire import from_bytes, to_bytes

with optional_import("encrypted profiles", "privacy"):
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES, NONCE_BYTES, KEY_FILE = 32, 16, "secret.key"
_FRAME_BYTES = 512
"""More than a sealed profile has besides its velocities."""
_MOST_SLOTS = 10**9
_ONCE = bytes(12)
"""The cipher's nonce: constant, since every message has its own key."""


def seal(key: bytes, request: ProfileRequest, profile: Profile) -> bytes:
    """Seal a device's profile to the key-holder's configured key.

    Raises
    ------
    RejectedError
        If the request names another key or is incomplete; nothing is sent then.
    """
    if request.key != key:
        asked = (
            f"asked for {request.key.hex()[: 2 * KEY_BYTES]}, given {key.hex()} by the key-holder"
        )
        raise RejectedError("another key", f"{asked}: nothing was sent")
    if len(request.nonce) != NONCE_BYTES or request.device is None:
        raise RejectedError(
            "profile request",
            "it lacks the key-holder's nonce or a device's number: nothing was sent",
        )
    fresh = X25519PrivateKey.generate()
    start = public_half(fresh)
    cipher = _cipher(fresh, key, start + key)
    return start + cipher.encrypt(
        _ONCE, to_bytes(profile), request.nonce + str(request.device).encode()
    )


def unseal(
    secret: X25519PrivateKey, nonce: bytes, device: DeviceId, sealed: bytes, labels: int
) -> Profile:
    """Open a sealed profile, as the key-holder.

    Raises
    ------
    RejectedError
        If the seal is broken or the profile is not valid.
    """
    if len(sealed) > 8 * labels + _FRAME_BYTES:
        raise RejectedError(
            "oversized", f"{len(sealed)} bytes are no sealed profile of {labels} labels"
        )
    start, key = sealed[:KEY_BYTES], public_half(secret)
    try:
        cipher = _cipher(secret, start, start + key)
        plain = cipher.decrypt(_ONCE, sealed[KEY_BYTES:], nonce + str(device).encode())
    except InvalidTag:
        why = "it was altered, or sealed by another device, to another key or for an earlier nonce"
        raise RejectedError("broken seal", why) from None
    profile = screen_profile(from_bytes(plain, Profile), labels)
    if not 1 <= profile.capacity <= _MOST_SLOTS:
        raise RejectedError(
            "bad-capacity", f"{profile.capacity} is not a number from 1 to {_MOST_SLOTS}"
        )
    return profile


def _cipher(own: X25519PrivateKey, peer: bytes, keys: bytes) -> ChaCha20Poly1305:
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError as error:
        raise RejectedError("unusable public key", str(error)) from error
    return ChaCha20Poly1305(
        HKDF(SHA256(), 32, salt=None, info=b"fedkeep sealed profile" + keys).derive(shared)
    )


def read_public_key(text: str) -> bytes:
    """Read the key-holder's public key from a device's configuration."""
    if not text:
        raise ConfigError(
            "sealed profiles need privacy.public_key: the key-holder's, as "
            "`fedkeep keyholder show` prints"
        )
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"privacy.public_key must be {2 * KEY_BYTES} hexadecimal digits, got '{text[:80]}'"
        )
    return key


def create_key(directory: Path) -> bytes:
    """Make a fresh key, written whole or not at all, and return its public half.

    Raises
    ------
    ConfigError
        If the directory has a key already; it is kept.
    """
    if (directory / KEY_FILE).exists():
        raise ConfigError(
            f"{directory} has a key already, and nothing could replace it: name another directory"
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = X25519PrivateKey.generate()
    with atomic_write(directory / KEY_FILE, 0o600) as file:
        file.write(f"{secret.private_bytes_raw().hex()} {public_half(secret).hex()}\n".encode())
    return public_half(secret)


def open_key(directory: Path) -> X25519PrivateKey:
    """Read the secret key.

    The public key is in the same file, so that damage is detected.
    """
    path = directory / KEY_FILE
    try:
        first, second = (bytes.fromhex(word) for word in path.read_text(errors="replace").split())
        secret = X25519PrivateKey.from_private_bytes(first)
    except FileNotFoundError:
        what = (
            "put it back, or make another by `fedkeep keyholder create` and give every device "
            "its public key"
        )
        raise RejectedError("lost key", f"{path} is not there: {what}") from None
    except ValueError:
        secret, second = X25519PrivateKey.generate(), b""
    if public_half(secret) != second:
        raise RejectedError("damaged key", f"{path} is not as it was written: put it back")
    return secret


def public_half(secret: X25519PrivateKey) -> bytes:
    """Return the public key of a secret key."""
    return secret.public_key().public_bytes_raw()
