"""Serves the live page, in the foreground or from a thread."""

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedkeep.core.errors import ConfigError, FedkeepError, optional_import
from fedkeep.protocol.addresses import Address, is_loopback
from fedkeep.web.feed import DirectoryFeed, Feed, RemoteFeed

PORT = 8377
SHORTEST_TOKEN = 16


class LiveServer:
    """The live page of one directory or URL.

    The socket is bound on construction, so that `url` is valid before `run` is called.

    Parameters
    ----------
    source : Path or str
        A directory of runs, or the address of another `fedkeep watch`.
    host, port : str, int
        Where to listen; port 0 is any free one.
    token : str, optional
        The secret that a browser must present; required where others can reach `host`.
    troubles : callable
        Says what is not as it should be with the fleet whose records these are.

    Raises
    ------
    ConfigError
        If the address cannot be bound, or a token is missing or too short.
    """

    def __init__(
        self,
        source: Path | str,
        host: str = "127.0.0.1",
        port: int = PORT,
        token: str | None = None,
        troubles: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        with optional_import("The live page", "web"):
            import uvicorn

            from fedkeep.web.application import build
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"others can reach {host}: set a secret of your own with --token, or drop --host"
            )
        if token is not None and len(token) < SHORTEST_TOKEN:
            raise ConfigError(
                f"--token must have at least {SHORTEST_TOKEN} characters, got {len(token)}"
            )
        self._socket = _bound(host, port)
        remote = str(source).startswith(("http://", "https://"))
        try:
            self._feed: Feed = (
                RemoteFeed(str(source))
                if remote
                else DirectoryFeed(Path(source), troubles=troubles)
            )
        except FedkeepError:
            self._socket.close()
            raise
        app = build(self._feed, token, lambda: self._server.should_exit)
        options: dict[str, Any] = {
            "log_level": "warning",
            "lifespan": "off",
            "ws": "none",
            "server_header": False,
        }
        self._server = uvicorn.Server(
            uvicorn.Config(app, **options, access_log=False, timeout_graceful_shutdown=2)
        )
        address = Address(host, self._socket.getsockname()[1])
        self.url = f"http://{address}" + (f"/?token={token}" if token else "")

    def run(self) -> None:
        """Serve until `stop` is called from elsewhere or, in the main thread, until Ctrl-C."""
        with suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])
        self._feed.closed.set()

    def stop(self) -> None:
        """Have `run` return."""
        self._server.should_exit = True


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror as error:
        raise ConfigError(f"{host} is no address of this machine; give one with --host") from error
    try:
        return socket.create_server(
            (host, port), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        address = f"http://{Address(host, port)}"
        why = f"cannot listen on {address}: {os.strerror(error.errno or 0)}"
        if error.errno == errno.EADDRINUSE:
            why = (
                f"{address} is taken by another program; choose another port with --port, "
                "or 0 for any free one"
            )
        raise ConfigError(why) from error
