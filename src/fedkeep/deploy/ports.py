"""Who listens on a port of this machine, so that no fleet takes another's page for its own."""

import socket
from contextlib import suppress
from pathlib import Path

from fedkeep.core.errors import ConfigError

_LISTENING = "0A"


def listeners(port: int) -> frozenset[int]:
    """Return the processes that listen on a TCP port, as far as this user may see.

    Examples
    --------
    >>> import os
    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     listeners(server.getsockname()[1]) == {os.getpid()}
    True
    """
    sockets = set[str]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    return frozenset(
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if sockets and _has_open(entry, sockets)
    )


def require_free(port: int, needed_for: str, option: str, host: str = "127.0.0.1") -> None:
    """Raise if something listens on a port already.

    Parameters
    ----------
    port : int
        The port.
    needed_for : str
        What is to listen there, as in "the page".
    option : str
        The option that sets another port.
    host : str
        The address on which it is to listen.

    Raises
    ------
    ConfigError
        With the process that has the port, where it can be seen.
    """
    with suppress(OSError), socket.create_connection((host, port), 1):
        holders = sorted(listeners(port))
        by = f"process {holders[0]} ({_name(holders[0])})" if holders else "another program"
        raise ConfigError(
            f"{host}:{port}, needed for {needed_for}, is taken by {by}: "
            f"stop that, or choose another with {option}"
        )


def _has_open(process: Path, sockets: set[str]) -> bool:
    """Whether one of the sockets is among a process's open files."""
    try:
        links = list((process / "fd").iterdir())
    except OSError:
        return False
    for link in links:
        with suppress(OSError):
            if str(link.readlink()) in sockets:
                return True
    return False


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"
