"""The key-holder's files: two secret keys for its owner's eyes, and what it publishes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fedkeep.core.errors import ConfigError
from fedkeep.keyholder.ckks import COARSE, Scheme
from fedkeep.keyholder.parties import KeyHolder
from fedkeep.keyholder.public_context import PublicContext, read_public_context

SCHEMES = {"full": Scheme(), "coarse": COARSE}


class KeyDirectory:
    """A directory with `comparing.key`, `summing.key`, `devices.context` and `server.context`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def for_devices(self) -> Path:
        """The file that every device is given."""
        return self.root / "devices.context"

    @property
    def for_server(self) -> Path:
        return self.root / "server.context"

    def create(self, scheme: Scheme) -> PublicContext:
        """Makes fresh keys, all files or none; keys that exist are never overwritten, for nothing replaces them."""
        if self.root.exists() and any(self.root.iterdir()):
            raise ConfigError(f"{self.root} is not empty: keep the keys that are there, or name another directory")
        holder = KeyHolder.create(scheme)
        public, partial = holder.for_devices(), self.root.with_name(self.root.name + ".new")
        shutil.rmtree(partial, ignore_errors=True)
        holder.save(partial)
        (partial / self.for_devices.name).write_bytes(public.pack())
        (partial / self.for_server.name).write_bytes(holder.for_server().pack())
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.replace(self.root)
        _sync(self.root.parent)
        return public

    def public(self) -> PublicContext:
        """The devices' form of the public keys."""
        if not self.for_devices.exists():
            raise ConfigError(f"there are no keys in {self.root}: run `fedkeep keyholder create {self.root}` first")
        return read_public_context(self.for_devices)

    def open(self) -> KeyHolder:
        """The key-holder with its secret keys; a lost one is one sentence."""
        public = self.public()
        return KeyHolder.load(self.root, public.scheme, public.grid)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
