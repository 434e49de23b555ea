"""Where a device without an agent keeps what it knows between two messages: plain arrays, never a pickle."""

from pathlib import Path
from typing import Protocol
from zipfile import BadZipFile

import numpy as np
from flwr.app import Array, ArrayRecord, Context

from fedkeep.core.errors import DataError
from fedkeep.core.types import State
from fedkeep.files import writing

_FORM = 1
"""Of a file: to be raised when a device could not go on from what an older one saved."""


class DeviceMemory(Protocol):
    durable: bool
    """Whether what was saved is there after any crash: a privacy ledger can be kept in nothing less."""

    def load(self) -> State:
        """What was saved last; empty for a new device."""

    def save(self, state: State) -> None: ...


class ContextMemory:
    """In Flower's Context: it outlives messages, but neither the SuperNode nor the run."""

    durable = False

    def __init__(self, context: Context) -> None:
        self._state = context.state

    def load(self) -> State:
        record = self._state.array_records.get("fedkeep.device", ArrayRecord())
        return {name: array.numpy() for name, array in record.items()}

    def save(self, state: State) -> None:
        self._state["fedkeep.device"] = ArrayRecord({name: Array(np.asarray(a)) for name, a in state.items()})


class FileMemory:
    """In a file that is replaced whole: it outlives `kill -9` of device and server, and the loss of power.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "device.npz"
    >>> FileMemory(path).save({"seen": np.array(3)})
    >>> FileMemory(path).load()
    {'seen': array(3)}
    """

    durable = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> State:
        if not self._path.exists():
            return {}
        try:
            with self._path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                state = {name: file[name] for name in file.files}
        except (BadZipFile, ValueError, OSError) as error:
            raise DataError(f"the device state {self._path} is damaged: remove it to begin anew") from error
        if (form := int(state.pop("form", 0))) != _FORM:
            raise DataError(f"the device state {self._path} has form {form}, not {_FORM}: remove it to begin anew")
        return state

    def save(self, state: State) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with writing(self._path) as file:
            np.savez(file, allow_pickle=False, form=_FORM, **state)
