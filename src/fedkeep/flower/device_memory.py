"""Where a device without an agent keeps what it knows between two messages: a file of plain arrays.

There is no pickle in it. Flower's Context holds the file's name only.
"""

import logging
import tempfile
from os import getuid
from pathlib import Path
from secrets import token_hex
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from flwr.app import ConfigRecord, Context

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.types import State
from fedkeep.files import atomic_write

log = logging.getLogger("fedkeep.flower")

_FORM = 1
"""Of a file: to be raised when a device could not go on from what an older one saved."""
MEMORY = "fedkeep.memory"
"""The record of the Context that holds the file's name."""


class DeviceMemory:
    """A file that is replaced whole.

    It outlives `kill -9` of device and server, and the loss of power.

    Parameters
    ----------
    where
        The file; or Flower's Context, which is given the name of a new file in the machine's folder
        for temporary files. That one lives as long as a Context does: neither outlives a restart.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "device.npz"
    >>> DeviceMemory(path).save({"seen": np.array(3)})
    >>> DeviceMemory(path).load()
    {'seen': array(3)}
    """

    def __init__(self, where: Path | Context) -> None:
        self.durable = isinstance(where, Path)
        """Whether what was saved is there after any crash, as a privacy ledger must be."""
        self._expected = False
        if isinstance(where, Context):
            record = where.state.config_records.get(MEMORY, ConfigRecord())
            self._expected = "file" in record
            name = str(record.get("file", f"{token_hex(8)}.npz"))
            where.state[MEMORY] = ConfigRecord({**record, "file": name})
            where = _temporary_folder() / name
        self.path = where

    def load(self) -> State:
        """Read what was saved last; empty for a new device."""
        if not self.path.exists():
            if self._expected:
                log.warning("%s is gone: this device begins anew", self.path)
            return {}
        try:
            with self.path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                state = {name: file[name] for name in file.files}
        except (BadZipFile, ValueError, OSError) as error:
            raise DataError(
                f"the device state {self.path} is damaged: remove it to begin anew"
            ) from error
        if (form := int(state.pop("form", 0))) != _FORM:
            raise DataError(
                f"the device state {self.path} has form {form}, not {_FORM}: "
                "remove it to begin anew"
            )
        return state

    def save(self, state: State) -> None:
        """Replace the file; an array of zeros, such as an empty sum, takes next to nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path, 0o600) as file, ZipFile(file, "w") as archive:
            for name, array in {**state, "form": np.array(_FORM)}.items():
                values = np.asarray(array)
                member = ZipInfo(f"{name}.npy")
                member.compress_type = ZIP_STORED if values.any() else ZIP_DEFLATED
                with archive.open(member, "w", force_zip64=True) as opened:
                    np.lib.format.write_array(opened, values, allow_pickle=False)


def _temporary_folder() -> Path:
    """Make the user's own folder for files that need not outlive a restart."""
    folder = Path(tempfile.gettempdir()) / f"fedkeep-{getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if folder.is_symlink() or about.st_uid != getuid() or about.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must be a folder of this user's that nobody else can read: remove it, or "
            "name another by the variable TMPDIR"
        )
    return folder
