"""A folder into which other programs drop npz files."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedkeep.agent.arrivals import Arrival, IngestQueue, Source
from fedkeep.core.errors import ConfigError, DataError, RejectedError
from fedkeep.core.types import AnyArray

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.5


@dataclass
class FolderSource(Source):
    """Files hold `x` (n, ...), `y` (n,) and, if wanted, `ids` (n,). Write under another suffix, then rename to .npz."""

    path: str
    """The folder."""
    afterwards: Literal["delete", "keep"] = "delete"
    """What becomes of a file once all its samples are judged; `keep` moves it to the folder `done`."""
    max_bytes: int = 64_000_000
    """A larger file is refused unread, and so is one that would unpack to more."""

    def open(self) -> None:
        self._folder = Path(self.path)
        self._stuck: set[Path] = set()
        """Files that are done with and cannot be put away."""
        if not self._folder.is_dir():
            raise ConfigError(f"source '{self.name}': there is no folder {self._folder}")

    def run(self, intake: IngestQueue) -> None:
        while not intake.stopped:
            files = [file for file in sorted(self._folder.glob("*.npz")) if file not in self._stuck]
            for file in files:
                self._take(file, intake)
                if intake.stopped:
                    return
            if not files:
                intake.wait_stopped(_POLL_SECONDS)

    def _take(self, file: Path, intake: IngestQueue) -> None:
        """Hands over a file's samples; the file goes only when the last of them is acknowledged."""
        try:
            arrays = read_npz(file, self.max_bytes)
            x, y, ids = arrays["x"], arrays["y"], arrays.get("ids")
        except Exception as error:  # noqa: BLE001 - a damaged archive may raise anything at all
            reason = error.reason if isinstance(error, RejectedError) else "malformed"
            intake.refuse(reason, self.name, f"{file.name}: {error}")
            self._put_away(file, "refused")
            return
        if (
            y.ndim != 1
            or x.ndim < 1
            or len(x) != len(y)
            or not x.size
            or (ids is not None and ids.shape != y.shape)
        ):
            intake.refuse("shape", self.name, file.name, max(1, len(y) if y.ndim else 1))
            self._put_away(file, "refused")
            return
        left = len(y)

        def judged(_fate: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._put_away(file, "done" if self.afterwards == "keep" else None)

        for i in range(len(y)):
            if intake.stopped:
                return
            id_ = None if ids is None else ids[i].item()
            intake.offer(Arrival(x[i], y[i].item(), id_, self.name, judged), wait=True)
        while left and not intake.stopped:
            time.sleep(0.01)

    def _put_away(self, file: Path, folder: str | None) -> None:
        """Removes a file, or puts it where it is not read again, beside whatever has its name there."""
        try:
            if folder is None:
                file.unlink()
                return
            target, number = self._folder / folder / file.name, 0
            target.parent.mkdir(exist_ok=True)
            while target.exists():
                number += 1
                target = target.with_name(f"{file.stem}-{number}{file.suffix}")
            file.rename(target)
        except OSError as error:
            if file.exists():
                self._stuck.add(file)
                log.warning(
                    "source '%s': %s stays and is not read again (%s)",
                    self.name,
                    file,
                    error.strerror,
                )


_ENTRY, _MOST_ENTRIES = b"PK\1\2", 64
"""How each entry of an archive's table of contents begins."""


def read_npz(path: Path, limit: int) -> dict[str, AnyArray]:
    """The arrays of an archive; Python objects are no arrays here. A damaged one may raise anything."""
    from zipfile import (  # a megabyte that other agents do not need
        ZIP_DEFLATED,
        ZIP_STORED,
        ZipFile,
    )

    if not path.is_file():  # a pipe would be waited for, a device read for ever
        raise DataError(f"{path} is not a file")
    if path.stat().st_size > limit:
        raise RejectedError("oversized", f"{path} has more than {limit} bytes")
    if _entries(path) > _MOST_ENTRIES:  # each becomes an object many times its size
        raise RejectedError("oversized", f"{path} holds more than {_MOST_ENTRIES} arrays")
    with ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > limit:
            raise RejectedError("oversized", f"{path} would unpack to more than {limit} bytes")
        if any(member.compress_type not in (ZIP_STORED, ZIP_DEFLATED) for member in members):
            raise DataError(
                f"{path} is compressed in a way of which zipfile does not bound what it unpacks to"
            )
        arrays = {}
        for member in members:
            with archive.open(member) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            if array.size > member.file_size:  # numbers of no bytes
                raise DataError(
                    f"an array of {array.shape} {array.dtype} is not in {member.file_size} bytes"
                )
            arrays[member.filename.removesuffix(".npy")] = array
        return arrays


def _entries(path: Path) -> int:
    """At least as many as the archive has: what it says of their number need not be true."""
    count, seam = 0, b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            count += (seam + chunk).count(_ENTRY)
            seam = chunk[-len(_ENTRY) + 1 :]
    return count
