"""Follows another `fedkeep watch`, by the stream its own page reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

import msgspec

from fedkeep.core.errors import DataError
from fedkeep.records import Comparison, DeviceLine
from fedkeep.web.view import RunView, Update

_TIMEOUT_SECONDS = 30
"""Twice the silence that the other side allows itself, and some."""
_RETRY_SECONDS = 1.0
_updates = msgspec.json.Decoder(Update)
_devices = msgspec.json.Decoder(DeviceLine)


class RemoteFeed:
    """Updates from a URL, passed on; it reconnects by itself and keeps the last it knew meanwhile."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise DataError(f"{url} is not an address; give one such as http://127.0.0.1:8377")
        self._base = urlunsplit((parts.scheme, parts.netloc, "", "", ""))
        self._token = parse_qs(parts.query).get("token", [""])[0]
        self._title = parts.netloc
        self._views: dict[str, tuple[int, RunView]] = {}
        self._comparison = Comparison((), (), ())
        self._version = 1
        self._lock = threading.Lock()
        self._closed = threading.Event()
        stream = self._open("/api/stream")
        threading.Thread(target=self._follow, args=(stream,), daemon=True).start()

    def since(self, version: int) -> Update | None:
        with self._lock:
            if version >= self._version:
                return None
            return Update(
                title=self._title,
                version=self._version,
                keys=tuple(self._views),
                views=tuple(view for changed, view in self._views.values() if changed > version),
                comparison=self._comparison,
            )

    def device(self, key: str, device: int) -> DeviceLine | None:
        try:
            with self._open(f"/api/device?run={quote(key, safe='')}&device={device}") as answer:
                return _devices.decode(answer.read())
        except (DataError, OSError, HTTPException, msgspec.DecodeError):
            return None

    def close(self) -> None:
        self._closed.set()

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
            raise DataError(f"cannot reach {self._base}: {getattr(error, 'reason', error)}") from error
        return answer

    def _follow(self, stream: IO[bytes] | None) -> None:
        while stream is not None:
            with suppress(OSError, HTTPException, msgspec.DecodeError), stream:
                for update in self._received(stream):
                    self._take(update)
            stream = self._reopened()

    def _reopened(self) -> IO[bytes] | None:
        while not self._closed.wait(_RETRY_SECONDS):
            with suppress(DataError):
                return self._open("/api/stream")
        return None

    def _received(self, stream: IO[bytes]) -> Iterator[Update]:
        for line in stream:
            if self._closed.is_set():
                return
            if line.startswith(b"data:"):
                yield _updates.decode(line[5:])

    def _take(self, update: Update) -> None:
        with self._lock:
            self._version += 1
            for view in update.views:
                self._views[view.key] = (self._version, view)
            self._views = {key: self._views[key] for key in update.keys if key in self._views}
            self._comparison = update.comparison
            self._title = update.title
