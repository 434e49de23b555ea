"""Encryption at rest: AES-GCM over the content of each cell."""

import os
from hashlib import sha256
from pathlib import Path

from fedkeep.core.errors import ConfigError, needing

KEY_BYTES = 32
_NONCE = 12
OVERHEAD = _NONCE + 16


class Cipher:
    """Seals and opens cells under one key; a cell moved to another blob no longer opens."""

    def __init__(self, key: bytes) -> None:
        with needing("encryption at rest", "agent"):
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        self._aead = AESGCM(key)
        self.name = sha256(b"fedkeep store key" + key).hexdigest()[:16]
        """Tells keys apart without telling the key."""

    def seal(self, data: bytes, place: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._aead.encrypt(nonce, data, place)

    def unseal(self, sealed: bytes, place: bytes) -> bytes | None:
        """The content, or None if it was tampered with."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(sealed[:_NONCE], sealed[_NONCE:], place)
        except InvalidTag:
            return None


def cipher_of(file: str | Path | None, variable: str | None) -> Cipher | None:
    """Under the key of a file of 64 hex digits (or 32 raw bytes), or of an environment variable; None for neither."""
    if file is None and variable is None:
        return None
    place = str(file) if file is not None else f"the environment variable {variable}"
    try:
        key = os.environ.get(variable or "", "").encode() if file is None else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"the store's key cannot be read from {place}: {error.strerror}") from None
    if len(key) != KEY_BYTES:
        try:
            key = bytes.fromhex(key.decode().strip())
        except ValueError:
            key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{place} holds no key: write 64 hex digits into it, e.g. by `openssl rand -hex 32`")
    return Cipher(key)


def check_key(written: str | None, cipher: Cipher | None, path: Path) -> None:
    """Refuses to go on when the file was made under another key: nothing of it could be read, nor may it be lost."""
    given = cipher.name if cipher else None
    if written == given:
        return
    if written is None:
        raise ConfigError(f"{path} is not encrypted, but a key is set: erase the file or unset the key")
    if given is None:
        raise ConfigError(f"{path} is encrypted: set key_file or key_env of [store] to the key {written}")
    raise ConfigError(f"{path} was encrypted under the key {written}, not {given}: its samples need that key")
