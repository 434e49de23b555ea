"""The key-holder's public keys: a file that devices are given beforehand, known by its digest."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

import msgspec

from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.keyholder.ckks import Scheme, digest
from fedkeep.keyholder.order import Grid


@dataclass(frozen=True)
class PublicContext:
    """What the key-holder publishes; with keys to multiply it serves the server, without them the devices."""

    comparing: bytes
    summing: bytes
    scheme: Scheme
    grid: Grid
    name: bytes
    """The digest of the devices' form, by which ciphertexts say which key they are under."""

    @staticmethod
    def of(comparing: bytes, summing: bytes, scheme: Scheme, grid: Grid) -> PublicContext:
        """The devices' form, under its name: a digest of all that a device relies on."""
        return PublicContext(comparing, summing, scheme, grid, _name(comparing, summing, scheme, grid))

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(packed: bytes) -> PublicContext:
        try:
            return msgspec.msgpack.decode(packed, type=PublicContext)
        except (msgspec.DecodeError, ValueError) as error:
            raise RefusedError("unreadable public keys", f"{error}") from error


def read_public_context(path: Path, pinned: str = "") -> PublicContext:
    """The devices' form of a key-holder's public keys; its digest is computed, and must be the one pinned, if any."""
    if not path.exists():
        raise ConfigError(f"the key-holder's public keys {path} are not there: copy its devices.context to this device")
    public = PublicContext.unpack(path.read_bytes())
    found = _name(public.comparing, public.summing, public.scheme, public.grid)
    if found != public.name:
        raise RefusedError("damaged public keys", f"{path} does not have the digest it names")
    if pinned and found.hex() != pinned.lower():
        raise RefusedError("public keys of another key-holder", f"{path} has digest {found.hex()}, not {pinned}")
    return public


def _name(comparing: bytes, summing: bytes, scheme: Scheme, grid: Grid) -> bytes:
    about = repr((len(comparing), len(summing), astuple(scheme), astuple(grid))).encode()
    return digest(about + comparing + summing)
