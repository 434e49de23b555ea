"""Sources of a page's updates: a directory of runs, or the stream of another `fedkeep watch`."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

import msgspec

from fedkeep.core.errors import DataError
from fedkeep.records import Comparison, DeviceLine, Header, Run, compare
from fedkeep.records.lines import decode
from fedkeep.records.measures import BASES
from fedkeep.records.runs import Tail, planned_runs, run_paths, timing_path
from fedkeep.web.digest import Digest, RunView

MOST_BASES = 12
"""Limit of the methods that others are compared with on a page."""
_TIMEOUT_SECONDS = 30
"""More than twice the longest silence of the other side."""
_RETRY_SECONDS = 1.0
_LOST = (DataError, OSError, HTTPException, msgspec.DecodeError)
"""Errors after which a connection is made anew."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """The views of runs that changed since a version, and the keys of all runs."""

    title: str
    version: int
    keys: tuple[str, ...]
    views: tuple[RunView, ...]
    comparison: Comparison
    """Each method against every other, up to `MOST_BASES`."""
    planned: int = 0
    """Runs that were planned, begun or not; 0 where that is not known."""
    troubles: tuple[str, ...] = ()
    """What is not as it should be with the processes of a fleet on this machine."""
    words: tuple[str, ...] = ()
    """The recommendation of `fedkeep advise`, shown first."""


def compared(runs: Iterable[Run], first: Sequence[str] = ()) -> Comparison:
    """Compare every method with every other; the bases in `first` come first."""
    found = list(runs)
    methods = {run.header.method for run in found if run.evaluations}
    bases = dict.fromkeys(name for name in (*first, *BASES, *sorted(methods)) if name in methods)
    return compare(found, list(bases)[:MOST_BASES])


class Feed(ABC):
    """The latest view of each run with the version that changed it; thread-safe."""

    def __init__(self, title: str) -> None:
        self._title, self._version = title, 1
        self._views: dict[str, tuple[int, RunView]] = {}
        self._comparison = Comparison((), (), ())
        self._planned = 0
        self._troubles: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def since(self, version: int) -> Update | None:
        """Return what changed after `version` (0: everything), or None."""
        with self._lock:
            self._look()
            if version >= self._version:
                return None
            return Update(
                title=self._title,
                version=self._version,
                keys=tuple(self._views),
                views=tuple(view for changed, view in self._views.values() if changed > version),
                comparison=self._comparison,
                planned=self._planned,
                troubles=self._troubles,
            )

    @abstractmethod
    def device(self, key: str, device: int) -> DeviceLine | None:
        """Return the latest snapshot of one device of one run."""

    def _look(self) -> None:  # noqa: B027 - a remote feed reads in a thread of its own
        """Read what is new."""


class _Followed(Tail):
    """The record of one run, its timings, and their summary."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.digest: Digest | None = None
        self.modified = 0.0
        self._clock = Tail(timing_path(path))

    def refresh(self) -> bool:
        """Read what is new and return whether there was anything; a file may have vanished."""
        try:
            restarted, lines = self.read()
            self.modified = self.path.stat().st_mtime
        except OSError:
            return False
        with suppress(OSError):  # a run by another program may have no timings
            lines += self._clock.read()[1][-1:] if lines else []
        for raw in lines:
            try:
                line = decode(raw)
                if isinstance(line, Header):
                    self.digest = Digest(line)
                elif self.digest is not None and line is not None:
                    self.digest.add(line)
            except DataError:
                if self.digest is not None:
                    self.digest.damaged += 1
        return restarted or bool(lines)


class DirectoryFeed(Feed):
    """Updates from the files of a directory, read at most every `pause` seconds.

    Parameters
    ----------
    directory : Path
        Where the records are.
    pause : float
        Seconds between two looks.
    troubles : callable
        Says what is not as it should be with the fleet that writes the records.
    """

    def __init__(
        self,
        directory: Path,
        pause: float = 0.4,
        troubles: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        if not directory.is_dir():
            raise DataError(
                f"{directory} is not a directory; give the one that `fedkeep run --out` writes to"
            )
        super().__init__(directory.resolve().name)
        self._directory, self._pause, self._read_troubles = directory, pause, troubles
        self._runs: dict[str, _Followed] = {}
        self._looked = float("-inf")

    def device(self, key: str, device: int) -> DeviceLine | None:
        """Return the latest snapshot of one device of one run."""
        with self._lock:
            self._look()
            digest = self._runs[key].digest if key in self._runs else None
            return digest.devices.get(device) if digest is not None else None

    def _look(self) -> None:
        """Read what is new, unless that was done a moment ago."""
        if time.monotonic() - self._looked < self._pause:
            return
        found = {path.relative_to(self._directory): path for path in run_paths(self._directory)}
        paths = {place.with_suffix("").as_posix(): path for place, path in found.items()}
        gone = self._runs.keys() - paths.keys()
        self._runs = {
            key: self._runs.get(key) or _Followed(path) for key, path in sorted(paths.items())
        }
        changed = {key for key, run in self._runs.items() if run.refresh()}
        planned = len(planned_runs(self._directory))
        troubles = self._read_troubles()
        if changed or gone or (planned, troubles) != (self._planned, self._troubles):
            self._version += 1
            self._planned, self._troubles = planned, troubles
            known = {
                key: (run, run.digest) for key, run in self._runs.items() if run.digest is not None
            }
            self._views = {
                key: (self._version, digest.view(key, run.modified))
                if key in changed
                else self._views[key]
                for key, (run, digest) in known.items()
            }
            self._comparison = compared(digest.as_run(run.path) for run, digest in known.values())
        self._looked = time.monotonic()


class RemoteFeed(Feed):
    """Updates from a URL; it reconnects by itself and keeps the last state meanwhile."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise DataError(f"{url} is not an address; give one such as http://127.0.0.1:8377")
        super().__init__(parts.netloc)
        self._base = urlunsplit((parts.scheme, parts.netloc, "", "", ""))
        self._token = parse_qs(parts.query).get("token", [""])[0]
        stream = self._open("/api/stream")
        threading.Thread(target=self._follow, args=(stream,), daemon=True).start()

    def device(self, key: str, device: int) -> DeviceLine | None:
        """Return the latest snapshot of one device of one run."""
        with (
            suppress(*_LOST),
            self._open(f"/api/device?run={quote(key, safe='')}&device={device}") as answer,
        ):
            return msgspec.json.decode(answer.read(), type=DeviceLine)
        return None

    def _open(self, path: str) -> IO[bytes]:
        """Open a path of the other page; an error or a timeout is raised as a DataError."""
        request = Request(self._base + path)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            answer: IO[bytes] = urlopen(request, timeout=_TIMEOUT_SECONDS)
        except HTTPError as error:
            error.close()
            hint = "; add ?token=... to the address" if error.code in (401, 403) else ""
            raise DataError(f"{self._base} answered {error.code} {error.reason}{hint}") from error
        except (URLError, OSError) as error:
            raise DataError(
                f"cannot reach {self._base}: {getattr(error, 'reason', error)}"
            ) from error
        return answer

    def _follow(self, stream: IO[bytes] | None) -> None:
        while not self.closed.is_set():
            with suppress(*_LOST), stream or self._open("/api/stream") as lines:
                for line in lines:
                    if self.closed.is_set():
                        return
                    if line.startswith(b"data:"):
                        self._take(msgspec.json.decode(line[5:], type=Update))
            stream = None
            self.closed.wait(_RETRY_SECONDS)

    def _take(self, update: Update) -> None:
        with self._lock:
            self._version += 1
            for view in update.views:
                self._views[view["key"]] = (self._version, view)
            self._views = {key: self._views[key] for key in update.keys if key in self._views}
            self._comparison = update.comparison
            self._title = update.title
            self._planned, self._troubles = update.planned, update.troubles
