"""The key-holder's port: answers the fleet's server, and nobody else, with public keys and plans."""

import logging
import socket
import ssl
import threading

import numpy as np

from fedkeep.core.coordination import Greedy
from fedkeep.core.errors import ConfigError, FedkeepError, RefusedError
from fedkeep.core.types import AnyArray
from fedkeep.keyholder import port
from fedkeep.keyholder.parties import KeyDirectory
from fedkeep.link.addresses import Address
from fedkeep.link.framing import receive_frame, send_frame
from fedkeep.link.messages import Failed
from fedkeep.link.wire import from_bytes, to_bytes

log = logging.getLogger("fedkeep.keyholder")

_HANDSHAKE_SECONDS = 5.0
_PATIENCE_SECONDS = 60.0
"""How long the server may be silent; whoever else connects has less time to show that it is the server."""
_CONNECTIONS = 4
"""At a time: there is one server, and each connection may hold some hundred megabytes."""


class KeyService:
    """Listens until it is closed; it decrypts signs and totals only, in order to answer with a plan."""

    def __init__(
        self, keys: KeyDirectory, address: Address, tls: ssl.SSLContext | None, least_devices: int = 3
    ) -> None:
        if tls is None and not address.is_loopback:
            raise ConfigError(f"--insecure is for loopback only, and {address.host} is not: run `fedkeep provision`")
        self._keys, self._holder, self._name = keys, keys.open(), keys.public().name
        self._tls, self._least = tls, least_devices
        self._planning, self._free = threading.Lock(), threading.Semaphore(_CONNECTIONS)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._socket = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
        self.address = Address(address.host, self._socket.getsockname()[1])

    def run(self) -> None:
        """Answers until `close`; every connection has its own thread."""
        while True:
            self._free.acquire()
            try:
                connection, peer = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection, peer[0]), daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self, plain: socket.socket, peer: str) -> None:
        plain.settimeout(_HANDSHAKE_SECONDS)
        try:
            with plain, self._authenticated(plain) as connection:
                connection.settimeout(_PATIENCE_SECONDS)
                while (payload := receive_frame(connection)) is not None:
                    send_frame(connection, to_bytes(self.answer(payload, peer)))
        except (OSError, RefusedError) as error:
            log.warning("%s: %s", peer, error)
        finally:
            self._free.release()

    def _authenticated(self, plain: socket.socket) -> socket.socket:
        """The connection, once TLS has shown that the server is at its other end."""
        if self._tls is None:
            return plain
        connection = self._tls.wrap_socket(plain, server_side=True)
        if (name := port.peer_name(connection)) != port.PLANNER:
            connection.close()
            raise RefusedError("not the server", f"its certificate is that of '{name}'")
        return connection

    def answer(self, payload: bytes, peer: str) -> port.KeyReply:
        """The reply to one request; a request that cannot be met is answered with the reason."""
        try:
            request: port.KeyRequest = from_bytes(payload, port.KeyRequest)
            if isinstance(request, port.AskPlan):
                return self._plan(request, peer)
            return port.PublishedKeys(self._keys.for_server.read_bytes(), self._least)
        except RefusedError as refusal:
            log.warning("%s refused: %s", peer, refusal)
            return Failed(refusal.reason, refusal.detail)
        except (FedkeepError, ValueError, OSError) as error:
            log.warning("%s refused: %s", peer, error)
            return Failed("error", str(error))

    def _plan(self, request: port.AskPlan, peer: str) -> port.Planned:
        tables = self._tables(request)
        greedy = Greedy(
            clients_per_label=request.clients_per_label,
            labels_per_client=request.labels_per_client,
            quantities=request.quantities,
        )
        before = None if request.before is None else port.sound_plan(request.before)
        with self._planning:
            plan = self._holder.plan(tables, greedy, before)
        log.info("planned for %d devices and %d labels, asked by %s", len(plan.devices), tables.labels, peer)
        return port.Planned(plan)

    def _tables(self, request: port.AskPlan) -> port.EncryptedTables:
        """The tables, if they are under these keys and about devices enough for their totals to hide each."""
        tables = request.tables
        if tables.name != self._name:
            raise RefusedError("another key", f"these tables are not under {self._name.hex()}: ask for profiles anew")
        devices, capacities = _whole(tables.devices), _whole(tables.capacities)
        present = devices[capacities > 0] if devices.shape == capacities.shape else devices
        if devices.shape != capacities.shape or len(set(present.tolist())) != len(present) or (present < 0).any():
            raise RefusedError("tables of the wrong form", "devices and capacities do not fit each other")
        if len(present) < self._least:
            raise RefusedError(
                "too few devices", f"totals over {len(present)} would tell of each: at least {self._least} are needed"
            )
        return tables


def _whole(numbers: AnyArray) -> AnyArray:
    if numbers.ndim != 1 or numbers.dtype != np.int64 or len(numbers) > 10_000:
        raise RefusedError("tables of the wrong form", "expected a list of whole numbers")
    return numbers
