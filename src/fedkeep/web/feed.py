"""Follows the runs in a directory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from fedkeep.core.errors import DataError
from fedkeep.records import Comparison, DeviceLine, Header, Timing
from fedkeep.records.codec import decode
from fedkeep.records.reader import Tail, run_paths
from fedkeep.records.recorder import timing_path
from fedkeep.web.digest import Digest
from fedkeep.web.view import RunView, Update, compared


class _Followed:
    """One run's file, its clock's, and what is known of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest: Digest | None = None
        self.version = 0
        self.view: RunView | None = None
        self.modified = 0.0
        self._tail = Tail(path)
        self._clock = timing_path(path)

    def refresh(self) -> bool:
        """Whether something came; a file that is gone since it was listed has nothing new."""
        try:
            restarted, lines = self._tail.read()
            self.modified = self.path.stat().st_mtime
        except OSError:
            return False
        if restarted:
            self.digest = None
        for raw in lines:
            self._add(raw)
        if self.digest is not None and lines:
            self.digest.seconds = _last_seconds(self._clock)
        return restarted or bool(lines)

    def _add(self, raw: bytes) -> None:
        try:
            line = decode(raw)
        except DataError:
            line = None
            if self.digest is not None:
                self.digest.damaged += 1
        if isinstance(line, Header):
            self.digest = Digest(line)
        elif self.digest is not None and line is not None:
            self.digest.add(line)


def _last_seconds(path: Path) -> float | None:
    """What the clock's file says last; None where there is none, or none any more."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            lines = file.read().splitlines()
    except OSError:
        return None
    for raw in reversed(lines):
        try:
            line = decode(raw)
        except DataError:
            continue
        if isinstance(line, Timing):
            return line.seconds
    return None


class DirectoryFeed:
    """Updates from the files of a directory; safe to ask from several threads."""

    def __init__(self, directory: Path, pause: float = 0.4) -> None:
        if not directory.is_dir():
            raise DataError(f"{directory} is not a directory; give the one that `fedkeep run --out` writes to")
        self._directory = directory
        self._pause = pause
        self._runs: dict[str, _Followed] = {}
        self._version = 1
        self._comparison = Comparison((), (), ())
        self._looked = float("-inf")
        self._lock = threading.Lock()

    def since(self, version: int) -> Update | None:
        with self._lock:
            self._look()
            if version >= self._version:
                return None
            changed = (run.view for run in self._runs.values() if run.version > version)
            return Update(
                title=self._directory.resolve().name,
                version=self._version,
                keys=tuple(key for key, run in self._runs.items() if run.view is not None),
                views=tuple(view for view in changed if view is not None),
                comparison=self._comparison,
            )

    def device(self, key: str, device: int) -> DeviceLine | None:
        with self._lock:
            self._look()
            run = self._runs.get(key)
            return run.digest.devices.get(device) if run is not None and run.digest is not None else None

    def close(self) -> None:
        """Nothing is kept open."""

    def _look(self) -> None:
        """Reads what came, unless somebody asked a moment ago."""
        if time.monotonic() - self._looked < self._pause:
            return
        self._refresh()
        self._looked = time.monotonic()

    def _refresh(self) -> None:
        paths = {self._key(path): path for path in run_paths(self._directory)}
        gone = self._runs.keys() - paths.keys()
        for key in gone:
            del self._runs[key]
        for key in paths.keys() - self._runs.keys():
            self._runs[key] = _Followed(paths[key])
        self._runs = {key: self._runs[key] for key in sorted(self._runs)}
        changed = [key for key, run in self._runs.items() if run.refresh()]
        if changed or gone:
            self._renew(changed)

    def _renew(self, changed: list[str]) -> None:
        self._version += 1
        for key in changed:
            run = self._runs[key]
            run.version = self._version
            run.view = run.digest.view(key, run.modified) if run.digest is not None else None
        digests = ((run.digest, run.path) for run in self._runs.values())
        self._comparison = compared(digest.as_run(path) for digest, path in digests if digest is not None)

    def _key(self, path: Path) -> str:
        return path.relative_to(self._directory).with_suffix("").as_posix()
