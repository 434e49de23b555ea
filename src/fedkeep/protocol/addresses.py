"""HOST:PORT, and whether it leaves this machine."""

import ipaddress
from dataclasses import dataclass

from fedkeep.core.errors import ConfigError


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
