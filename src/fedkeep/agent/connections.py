"""Connections in a bounded number: beyond it, one that has sent nothing yet makes room first."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedkeep.core.errors import ConfigError, FedkeepError

log = logging.getLogger(__name__)
_PAUSE = 0.2
_THREADS = 2
"""For each connection at a time: one that had to make room may still wait for the agent."""
_LONGEST_PATH = 107


class Listener:
    """Serves each connection in a thread of its own, and at most `limit` at a time.

    One more takes the place of the oldest that has sent no valid message yet, so that a flood
    of idle connections costs no sender its own; only where all have, of the one silent the longest.
    While the threads of those that made room all wait for the agent, as where its disk is full and
    senders give up and come again, no more are let in.
    """

    def __init__(self, where: Path | tuple[str, int], limit: int) -> None:
        try:
            if isinstance(where, Path):
                self._server = listen_unix(where)
            else:
                family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
                self._server = socket.create_server(where, family=family)
        except OSError as error:
            address = where if isinstance(where, Path) else f"{where[0]}:{where[1]}"
            remedy = "choose another address or stop what is there"
            raise FedkeepError(f"cannot listen at {address}: {error.strerror}; {remedy}") from error
        self._limit = limit
        self._heard: dict[socket.socket, float] = {}
        """The open connections, with when each last did something."""
        self._proven: set[socket.socket] = set()
        """Those that have sent a valid message."""
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._threads = 0
        self._closed = False

    def start(self, serve: Callable[[socket.socket], None]) -> None:
        """Listen in a thread until it is closed.

        Nothing that goes wrong with a connection ends it.
        """
        self._server.settimeout(_PAUSE)
        threading.Thread(target=self._listen, args=(serve,), daemon=True).start()

    def _listen(self, serve: Callable[[socket.socket], None]) -> None:
        while not self._closed:
            with self._lock:
                if not self._ended.wait_for(self._has_thread, _PAUSE):
                    continue
            try:
                connection, _ = self._server.accept()
            except (TimeoutError, ConnectionAbortedError):
                continue
            except OSError as error:
                if not self._closed:
                    log.warning("a connection could not be taken (%s)", error.strerror)
                    time.sleep(_PAUSE)  # descriptors run out; others may be closed meanwhile
                continue
            connection.settimeout(None)
            with self._lock:
                if len(self._heard) >= self._limit:
                    self._end(min(self._heard, key=self._rank))
                self._heard[connection] = time.monotonic()
                self._threads += 1
            try:
                threading.Thread(target=self._serve, args=(connection, serve), daemon=True).start()
            except RuntimeError:  # there are too many of them on this machine
                with connection:
                    self._forget(connection)

    def _has_thread(self) -> bool:
        return self._threads < _THREADS * self._limit

    def _forget(self, connection: socket.socket) -> None:
        """Take note that the thread of a connection has ended, or could not begin."""
        with self._lock:
            self._heard.pop(connection, None)
            self._proven.discard(connection)
            self._threads -= 1
            self._ended.notify_all()

    def touch(self, connection: socket.socket) -> None:
        """Note that a connection has just sent a valid message."""
        with self._lock:
            if connection in self._heard:
                self._heard[connection] = time.monotonic()
                self._proven.add(connection)

    def _rank(self, connection: socket.socket) -> tuple[bool, float]:
        """Return the lowest makes room first."""
        return connection in self._proven, self._heard[connection]

    def _end(self, connection: socket.socket) -> None:
        """Forgets a connection and shuts it, so that its own thread ends."""
        del self._heard[connection]
        self._proven.discard(connection)
        _shut(connection)

    def close(self) -> None:
        """End all connections, and listen no more."""
        self._closed = True
        # Closing alone would let others connect until the thread that accepts them looks again.
        _shut(self._server)
        self._server.close()
        with self._lock:
            for connection in self._heard:
                _shut(connection)

    def _serve(self, connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            with connection:
                serve(connection)
        except OSError:
            pass  # the other side went away
        except Exception:
            log.exception("a connection was ended")
        self._forget(connection)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def listen_unix(path: Path) -> socket.socket:
    """Return a Unix socket that only its owner may use.

    A file left over from a dead process is replaced.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(
            f"the path of a socket has at most {_LONGEST_PATH} bytes, not as many as {path}"
        )
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)):
                    path.unlink()
        server.bind(str(path))
        path.chmod(0o600)
        server.listen()
    except OSError as error:
        server.close()
        if isinstance(error, FileNotFoundError):
            raise ConfigError(
                f"there is no folder {path.parent} for the socket {path.name}"
            ) from error
        raise
    return server
