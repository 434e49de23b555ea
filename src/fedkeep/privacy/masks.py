"""Keys agreed between two devices, and the masks and envelopes made of them.

Curves, key derivation, ciphers (`cryptography`) and secret sharing (`PyCryptodome`) come from the libraries
that Flower's own secure aggregation rests on: a Flower device has them already, any other needs no Flower.
"""

import secrets
from collections.abc import Iterable

import numpy as np

from fedkeep.core.errors import RefusedError, needing
from fedkeep.privacy.fixed_point import WORD, Words

with needing("secure aggregation", "privacy"):
    from Crypto.Protocol.SecretSharing import Shamir
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SEED_BYTES = 16
SHARE_BYTES = 16
_NONCE_BYTES = 12


def fresh_seed() -> bytes:
    """A secret from which a mask or a private key is derived, of the length that can be shared."""
    return secrets.token_bytes(SEED_BYTES)


def derive(secret: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes for one purpose."""
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(secret)


def public_key(seed: bytes) -> bytes:
    """The public half of the key pair that `seed` stands for."""
    return _private_key(seed).public_key().public_bytes_raw()


def agree(seed: bytes, peer: bytes, purpose: bytes) -> bytes:
    """The key that both ends derive, each from its own seed and the other's public key."""
    try:
        shared = _private_key(seed).exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError as error:
        raise RefusedError("unusable public key", str(error)) from error
    return derive(shared, purpose)


def mask(key: bytes, size: int) -> Words:
    """That many integers that nobody without the key can tell from random ones; never twice for one key."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(size * WORD.itemsize)), dtype=WORD)


def seal(key: bytes, content: bytes, header: bytes) -> bytes:
    """The content, readable and changeable only with the key, and bound to the header."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, header)


def unseal(key: bytes, envelope: bytes, header: bytes) -> bytes:
    """What `seal` put into the envelope."""
    try:
        return ChaCha20Poly1305(key).decrypt(envelope[:_NONCE_BYTES], envelope[_NONCE_BYTES:], header)
    except (InvalidTag, ValueError) as error:
        raise RefusedError("envelope that does not open", "it was changed, or is for another device") from error


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares 1, 2, ..., count of a secret; any `threshold` of them give it back, fewer tell nothing."""
    return [share for _, share in Shamir.split(threshold, count, secret, False)]


def combine(shares: Iterable[tuple[int, bytes]]) -> bytes:
    """The secret behind numbered shares."""
    return bytes(Shamir.combine(list(shares), False))


def _private_key(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derive(seed, b"fedkeep private key"))
