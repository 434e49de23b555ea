"""A folder into which other programs drop npz files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedkeep.agent.arrivals import Arrival, Sink
from fedkeep.core.errors import ConfigError


@dataclass(frozen=True)
class FolderOptions:
    """Files hold `x` (n, ...), `y` (n,) and, if wanted, `ids` (n,). Write under another suffix, then rename to .npz."""

    name: str
    path: str
    afterwards: Literal["delete", "keep"] = "delete"
    """What becomes of a file once all its samples are judged; `keep` moves it to the folder `done`."""
    poll_seconds: float = 0.5
    max_bytes: int = 64_000_000
    """A larger file is refused unread."""

    def __post_init__(self) -> None:
        if not self.poll_seconds > 0:
            raise ValueError(f"poll_seconds must be above 0, got {self.poll_seconds}")


class FolderSource:
    def __init__(self, options: FolderOptions, sample_bytes: int) -> None:  # noqa: ARG002 - files have their own limit
        self.name = options.name
        self._options = options
        self._folder = Path(options.path)

    def open(self) -> None:
        if not self._folder.is_dir():
            raise ConfigError(f"source '{self.name}': there is no folder {self._folder}")

    def run(self, sink: Sink) -> None:
        while not sink.stopped:
            files = sorted(self._folder.glob("*.npz"))
            for file in files:
                self._take(file, sink)
            if not files:
                time.sleep(self._options.poll_seconds)

    def close(self) -> None: ...

    def _take(self, file: Path, sink: Sink) -> None:
        """Hands over a file's samples; the file goes only when the last of them is acknowledged."""
        arrays = self._read(file, sink)
        if arrays is None:
            self._move(file, "refused")
            return
        x, y, ids = arrays
        left = len(y)

        def judged(_fate: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._put_away(file)

        for i in range(len(y)):
            if sink.stopped:
                return
            id_ = None if ids is None else ids[i].item()
            sink.offer(Arrival(x[i], y[i].item(), id_, self.name, judged), wait=True)
        while left and not sink.stopped:
            time.sleep(0.01)

    def _read(self, file: Path, sink: Sink) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
        from zipfile import BadZipFile  # a megabyte that other agents do not need

        if file.stat().st_size > self._options.max_bytes:
            sink.refuse("oversized")
            return None
        try:
            with np.load(file, allow_pickle=False) as arrays:
                x, y = arrays["x"], arrays["y"]
                ids = arrays.get("ids")
        except (OSError, ValueError, KeyError, BadZipFile):
            sink.refuse("malformed")
            return None
        if y.ndim != 1 or len(x) != len(y) or not len(y) or (ids is not None and ids.shape != y.shape):
            sink.refuse("shape", max(1, len(y) if y.ndim else 1))
            return None
        return x, y, ids

    def _put_away(self, file: Path) -> None:
        if self._options.afterwards == "delete":
            file.unlink(missing_ok=True)
        else:
            self._move(file, "done")

    def _move(self, file: Path, folder: str) -> None:
        target = self._folder / folder
        target.mkdir(exist_ok=True)
        file.rename(target / file.name)
