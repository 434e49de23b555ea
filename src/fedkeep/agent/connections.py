"""Connections in a bounded number: beyond it, the one that has been silent the longest makes room."""

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


class AddressTakenError(FedkeepError):
    """Another program listens there."""

    def __init__(self, address: str, detail: str | None) -> None:
        super().__init__(f"cannot listen at {address}: {detail}; choose another address or stop what is there")


class Connections:
    """The open connections of one listener, with when each last did something."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._active: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._active)

    def admit(self, connection: socket.socket) -> None:
        """Takes a connection in; its thread must call `leave` when it ends."""
        with self._lock:
            if len(self._active) >= self._limit:
                silent = min(self._active, key=self._active.__getitem__)
                del self._active[silent]
                _shut(silent)
            self._active[connection] = time.monotonic()

    def touch(self, connection: socket.socket) -> None:
        """It has just been heard of."""
        with self._lock:
            if connection in self._active:
                self._active[connection] = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._active.pop(connection, None)

    def close(self) -> None:
        with self._lock:
            for connection in self._active:
                _shut(connection)


def accept_until(
    listener: socket.socket,
    connections: Connections,
    serve: Callable[[socket.socket], None],
    stopped: Callable[[], bool],
) -> None:
    """Serves each connection in a thread of its own; nothing that goes wrong with one ends the listening."""
    listener.settimeout(_PAUSE)
    while not stopped():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError as error:
            if not stopped() and listener.fileno() >= 0:
                log.warning("a connection could not be taken (%s)", error.strerror)
                time.sleep(_PAUSE)  # descriptors run out; others may be closed meanwhile
                continue
            return
        connection.settimeout(None)
        connections.admit(connection)
        try:
            threading.Thread(target=_serve, args=(connection, connections, serve), daemon=True).start()
        except RuntimeError:
            connections.leave(connection)
            connection.close()


def _serve(connection: socket.socket, connections: Connections, serve: Callable[[socket.socket], None]) -> None:
    with connection:
        try:
            serve(connection)
        except OSError:
            pass  # the other side went away
        except Exception:
            log.exception("a connection was ended")
        finally:
            connections.leave(connection)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def listen_unix(path: Path) -> socket.socket:
    """A Unix socket that only its owner may use; a file left over from a dead process is replaced."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(f"the path of a socket has at most {_LONGEST_PATH} bytes, not as many as {path}")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        server.bind(str(path))
        path.chmod(0o600)
        server.listen()
    except OSError as error:
        server.close()
        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"there is no folder {path.parent} for the socket {path.name}") from error
        raise
    return server


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
