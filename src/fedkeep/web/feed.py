"""Where a page's updates come from: the runs in a directory, or the stream of another `fedkeep watch`."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
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
from fedkeep.records.runs import Tail, run_paths, timing_path
from fedkeep.web.digest import Digest, RunView

MOST_BASES = 12
"""Methods that others are compared with on a page."""
_TIMEOUT_SECONDS = 30
"""Twice the silence that the other side allows itself, and some."""
_RETRY_SECONDS = 1.0
_LOST = (DataError, OSError, HTTPException, msgspec.DecodeError)
"""How a connection may end that is to be made anew."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What a page needs to be up to date: the views that changed, and the names of all there are."""

    title: str
    version: int
    keys: tuple[str, ...]
    views: tuple[RunView, ...]
    comparison: Comparison
    """Each method against every other, as far as there are few enough."""
    words: tuple[str, ...] = ()
    """An advice, to be shown above all."""


def compared(runs: Iterable[Run], first: Sequence[str] = ()) -> Comparison:
    """The methods against each other, beginning with those that are measured against first."""
    found = list(runs)
    methods = {run.header.method for run in found if run.evaluations}
    bases = dict.fromkeys(name for name in (*first, *BASES, *sorted(methods)) if name in methods)
    return compare(found, list(bases)[:MOST_BASES])


class Feed(ABC):
    """The latest of each run, and when it changed; safe to ask from several threads."""

    def __init__(self, title: str) -> None:
        self._title, self._version = title, 1
        self._views: dict[str, tuple[int, RunView]] = {}
        self._comparison = Comparison((), (), ())
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def since(self, version: int) -> Update | None:
        """What changed after `version` (0: everything), or None."""
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
            )

    @abstractmethod
    def device(self, key: str, device: int) -> DeviceLine | None:
        """The latest snapshot of one device of one run."""

    def _look(self) -> None:  # noqa: B027 - a feed that is sent to takes nothing in by itself
        """Takes in what came since it was last called, where nobody else does."""


class _Followed(Tail):
    """One run's file, its clock's, and what is known of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.digest: Digest | None = None
        self.modified = 0.0
        self._clock = Tail(timing_path(path))

    def refresh(self) -> bool:
        """Whether something came; a file that is gone since it was listed has nothing new."""
        try:
            restarted, lines = self.read()
            self.modified = self.path.stat().st_mtime
        except OSError:
            return False
        with suppress(OSError):  # a run by another program may have no clock
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
    """Updates from the files of a directory."""

    def __init__(self, directory: Path, pause: float = 0.4) -> None:
        if not directory.is_dir():
            raise DataError(
                f"{directory} is not a directory; give the one that `fedkeep run --out` writes to"
            )
        super().__init__(directory.resolve().name)
        self._directory, self._pause = directory, pause
        self._runs: dict[str, _Followed] = {}
        self._looked = float("-inf")

    def device(self, key: str, device: int) -> DeviceLine | None:
        with self._lock:
            self._look()
            digest = self._runs[key].digest if key in self._runs else None
            return digest.devices.get(device) if digest is not None else None

    def _look(self) -> None:
        """Reads what came, unless somebody asked a moment ago."""
        if time.monotonic() - self._looked < self._pause:
            return
        found = {path.relative_to(self._directory): path for path in run_paths(self._directory)}
        paths = {place.with_suffix("").as_posix(): path for place, path in found.items()}
        gone = self._runs.keys() - paths.keys()
        self._runs = {
            key: self._runs.get(key) or _Followed(path) for key, path in sorted(paths.items())
        }
        changed = {key for key, run in self._runs.items() if run.refresh()}
        if changed or gone:
            self._version += 1
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
    """Updates from a URL, passed on; it reconnects by itself and keeps the last it knew meanwhile."""

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
        with (
            suppress(*_LOST),
            self._open(f"/api/device?run={quote(key, safe='')}&device={device}") as answer,
        ):
            return msgspec.json.decode(answer.read(), type=DeviceLine)
        return None

    def _open(self, path: str) -> IO[bytes]:
        """The answer's body; a refusal or silence becomes a sentence."""
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
