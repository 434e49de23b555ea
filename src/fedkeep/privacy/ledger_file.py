"""A ledger in a file of its own: neither a lost store nor one put back from a copy makes it forget."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import State
from fedkeep.privacy.ledger import KeptLedger


class LedgerFile:
    """Keeps the last committed snapshot whole: it is written beside, synced, and moved into place."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def found(self, said: State, *, damaged: bool) -> KeptLedger:
        """The ledger, made if there was never one; `said` is what the device's store knows of it.

        One that is missing where it must have been, or older than the store, is refused: what was spent is not known.
        """
        if not self._path.exists() and not damaged and not np.any(said.get("releases", 0)):
            return self.create()
        ledger = self.open()
        if ledger.is_behind(said):
            raise RefusedError(
                "old privacy ledger",
                f"{self._path} knows of less than its device has sent: put the newest one back, or give this device a "
                "new budget by moving both ledger and store away",
            )
        return ledger

    def create(self) -> KeptLedger:
        """Starts an empty ledger; refused where one exists, for starting anew would forget what was spent."""
        if self._path.exists():
            raise RefusedError("privacy ledger exists", f"{self._path} already counts a device's releases")
        ledger = KeptLedger()
        self.commit(ledger.snapshot())
        return ledger

    def open(self) -> KeptLedger:
        """The ledger as last committed; a missing or damaged file is refused, never taken as an empty one."""
        try:
            line = self._path.read_text()
        except FileNotFoundError:
            raise RefusedError(
                "lost privacy ledger",
                f"{self._path} is gone, so what was spent is not known: put it back, or give this device a new budget "
                "by moving its store away",
            ) from None
        body, _, checksum = line.rstrip("\n").rpartition(" ")
        if checksum != _checksum(body):
            raise RefusedError("damaged privacy ledger", f"{self._path} fails its checksum")
        ledger = KeptLedger()
        ledger.restore({name: np.array(values) for name, values in json.loads(body).items()})
        return ledger

    def commit(self, state: State) -> None:
        """Returns only when the snapshot would survive a loss of power."""
        body = json.dumps({name: values.tolist() for name, values in state.items()})
        beside = self._path.with_name(self._path.name + ".new")
        with beside.open("w") as file:
            file.write(f"{body} {_checksum(body)}\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _checksum(body: str) -> str:
    return blake2b(body.encode(), digest_size=16).hexdigest()
