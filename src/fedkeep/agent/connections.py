"""Connections in a bounded number: beyond it, one that has said nothing yet makes room first."""

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
_LONGEST_PATH = 107


class Listener:
    """Serves each connection in a thread of its own, and at most `limit` at a time.

    One more takes the place of the oldest that has not said anything of sense yet, so that a flood
    of idle connections costs no sender its own; only where all have, of the one silent the longest.
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
            mend = "choose another address or stop what is there"
            raise FedkeepError(f"cannot listen at {address}: {error.strerror}; {mend}") from error
        self._limit = limit
        self._heard: dict[socket.socket, float] = {}
        """The open connections, with when each last did something."""
        self._proven: set[socket.socket] = set()
        """Those that have said something of sense."""
        self._lock = threading.Lock()
        self._closed = False

    def start(self, serve: Callable[[socket.socket], None]) -> None:
        """Listen in a thread until it is closed.

        Nothing that goes wrong with a connection ends it.
        """
        self._server.settimeout(_PAUSE)
        threading.Thread(target=self._listen, args=(serve,), daemon=True).start()

    def _listen(self, serve: Callable[[socket.socket], None]) -> None:
        while not self._closed:
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
            try:
                threading.Thread(target=self._serve, args=(connection, serve), daemon=True).start()
            except RuntimeError:  # there are too many of them on this machine
                with self._lock, connection:
                    self._heard.pop(connection, None)

    def touch(self, connection: socket.socket) -> None:
        """Note that a connection has just said something of sense."""
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
        with self._lock:
            self._heard.pop(connection, None)
            self._proven.discard(connection)


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
