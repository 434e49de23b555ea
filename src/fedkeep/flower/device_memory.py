"""Where a device without an agent keeps what it knows between two messages: plain arrays, never a pickle."""

from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from flwr.app import Array, ArrayRecord, Context

from fedkeep.core.errors import DataError
from fedkeep.core.types import State
from fedkeep.files import atomic_write

_FORM = 1
"""Of a file: to be raised when a device could not go on from what an older one saved."""


class DeviceMemory:
    """In a file that is replaced whole, or in Flower's Context.

    The file outlives `kill -9` of device and server, and the loss of power; the Context outlives messages, but neither
    the SuperNode nor the run.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "device.npz"
    >>> DeviceMemory(path).save({"seen": np.array(3)})
    >>> DeviceMemory(path).load()
    {'seen': array(3)}
    """

    def __init__(self, where: Path | Context) -> None:
        self._where = where
        self.durable = isinstance(where, Path)
        """Whether what was saved is there after any crash: a privacy ledger can be kept in nothing less."""

    def load(self) -> State:
        """What was saved last; empty for a new device."""
        if isinstance(self._where, Context):
            record = self._where.state.array_records.get("fedkeep.device", ArrayRecord())
            return {name: array.numpy() for name, array in record.items()}
        if not self._where.exists():
            return {}
        try:
            with self._where.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                state = {name: file[name] for name in file.files}
        except (BadZipFile, ValueError, OSError) as error:
            raise DataError(
                f"the device state {self._where} is damaged: remove it to begin anew"
            ) from error
        if (form := int(state.pop("form", 0))) != _FORM:
            raise DataError(
                f"the device state {self._where} has form {form}, not {_FORM}: remove it to begin anew"
            )
        return state

    def save(self, state: State) -> None:
        if isinstance(self._where, Context):
            record = ArrayRecord({name: Array(np.asarray(array)) for name, array in state.items()})
            self._where.state["fedkeep.device"] = record
            return
        self._where.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._where) as file:
            np.savez(file, allow_pickle=False, form=_FORM, **state)
