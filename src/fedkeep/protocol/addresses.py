"""HOST:PORT, and whether it leaves this machine."""

import ipaddress
import logging
from dataclasses import dataclass

from fedkeep.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> "Address":
        """Parse `host:port`, or `[address]:port` for IPv6.

        Examples
        --------
        >>> Address.parse("[::1]:9000")
        Address(host='::1', port=9000)
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"an address is written HOST:PORT, not '{text}'")
        return Address(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Return whether traffic to this host stays on this machine.

    Examples
    --------
    >>> hosts = ("localhost", "127.1.2.3", "::1", "10.0.0.1", "fleet.example")
    >>> [host for host in hosts if is_loopback(host)]
    ['localhost', '127.1.2.3', '::1']
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_loopback(host: str, where: str, *, insecure: bool) -> None:
    """Raise where something without a password would listen beyond this machine by mistake.

    Parameters
    ----------
    host
        Where it listens.
    where
        The key that says so, for the sentence.
    insecure
        Whether the operator allows it all the same; then a warning is logged.

    Raises
    ------
    ConfigError
        If others could reach it and nobody allowed that.
    """
    if is_loopback(host):
        return
    if not insecure:
        raise ConfigError(
            f"{where} = '{host}' lets every machine that reaches this one in, without a password: "
            "keep it on 127.0.0.1, or set insecure = true beside it if the network is trusted"
        )
    log.warning(
        "%s = '%s' with insecure = true: whoever reaches this machine is let in", where, host
    )
