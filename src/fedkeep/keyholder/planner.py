"""The server's view of the key-holder: public keys to compute with, and plans from tables that only it can read."""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedkeep.core.coordination import Coordinator, Greedy
from fedkeep.core.errors import ConfigError, FedkeepError, RefusedError
from fedkeep.core.plan import Plan
from fedkeep.keyholder.messages import (
    AskPlan,
    AskPublicKeys,
    EncryptedTables,
    KeyReply,
    KeyRequest,
    Planned,
    PublishedKeys,
    sound_plan,
)
from fedkeep.keyholder.mutual_tls import KEYHOLDER, peer_name, planner_side
from fedkeep.keyholder.public_context import PublicContext
from fedkeep.link.addresses import Address
from fedkeep.link.framing import receive_frame, send_frame
from fedkeep.link.messages import Failed
from fedkeep.link.wire import from_bytes, to_bytes

Answer = TypeVar("Answer", bound=KeyReply)
_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 30.0
"""Longer than the key-holder gives to whoever is silent: it may have to see some of them off first."""
_ANSWER_SECONDS = 300.0


class KeyHolderUnreachableError(FedkeepError):
    """Nobody answers at the key-holder's address, or not as the key-holder."""


class KeyHolderClient:
    """The key-holder at an address; without TLS on loopback only."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        if tls is None and not address.is_loopback:
            raise ConfigError(f"without TLS the key-holder must be on loopback, and {address} is not")
        self.address, self._tls = address, tls

    def public_keys(self) -> PublishedKeys:
        return self._ask(AskPublicKeys(), PublishedKeys)

    def plan(self, request: AskPlan) -> Planned:
        return self._ask(request, Planned)

    def _ask(self, request: KeyRequest, expected: type[Answer]) -> Answer:
        try:
            payload = self._exchange(to_bytes(request))
        except (OSError, EOFError) as error:
            why = getattr(error, "strerror", None) or error
            raise KeyHolderUnreachableError(f"the key-holder at {self.address} does not answer ({why})") from error
        reply = from_bytes(payload, KeyReply)
        if isinstance(reply, Failed):
            raise RefusedError(reply.reason, reply.detail)
        if not isinstance(reply, expected):
            raise RefusedError("malformed", f"the key-holder answered with {type(reply).__name__}")
        return reply

    def _exchange(self, payload: bytes) -> bytes:
        with contextlib.ExitStack() as stack:
            where = (self.address.host, self.address.port)
            plain = stack.enter_context(socket.create_connection(where, _CONNECT_SECONDS))
            plain.settimeout(_HANDSHAKE_SECONDS)
            connection = plain
            if self._tls is not None:
                secure = stack.enter_context(self._tls.wrap_socket(plain, server_hostname=self.address.host))
                if peer_name(secure) != KEYHOLDER:
                    raise ssl.SSLError(0, f"its certificate is not the {KEYHOLDER}'s")
                connection = secure
            connection.settimeout(_ANSWER_SECONDS)
            send_frame(connection, payload)
            answer = receive_frame(connection)
        if answer is None:
            raise EOFError("it closed the connection")
        return answer


@dataclass(frozen=True)
class KeyHolderOptions:
    """`keyholder`: where the key-holder of encrypted profiles answers."""

    address: str = ""
    """HOST:PORT of `fedkeep keyholder serve`."""
    credentials: str = ""
    """A directory with ca.crt, planner.crt and planner.key, made by `fedkeep provision --key-holder HOST`."""
    insecure: bool = False
    """No TLS: loopback only."""

    def client(self) -> KeyHolderClient:
        if not self.address:
            raise ConfigError(
                "privacy.encrypted-profiles needs keyholder.address: where `fedkeep keyholder serve` runs"
            )
        if self.insecure == bool(self.credentials):
            raise ConfigError("set keyholder.credentials, or keyholder.insecure=true on loopback, and not both")
        tls = None if self.insecure else planner_side(Path(self.credentials))
        return KeyHolderClient(Address.parse(self.address), tls)


class RemotePlanner:
    """Greedy plans, made by the key-holder; other coordinators need velocities, which nobody can read."""

    def __init__(self, client: KeyHolderClient, coordinator: Coordinator) -> None:
        if not isinstance(coordinator, Greedy) or coordinator.quantities == "lp":
            raise ConfigError(
                "encrypted profiles are planned by coordinator 'greedy' with quantities 'even' or 'frequent' only"
            )
        self._client, self._greedy = client, coordinator

    def public_context(self) -> PublicContext:
        """The keys to multiply under encryption: some hundred megabytes, asked for once a table."""
        return PublicContext.unpack(self._client.public_keys().packed)

    def plan(self, tables: EncryptedTables, before: Plan | None) -> Plan:
        """The plan for the devices of the tables; one for others, or for more slots than they have, is refused."""
        greedy = self._greedy
        asked = AskPlan(tables, greedy.quantities, greedy.clients_per_label, greedy.labels_per_client, before)
        plan = sound_plan(self._client.plan(asked).plan)
        present = np.flatnonzero(tables.capacities > 0)
        present = present[np.argsort(tables.devices[present])]
        if not np.array_equal(plan.devices, tables.devices[present]) or plan.quotas.shape[1] != tables.labels:
            raise RefusedError("malformed plan", "it is not for the devices and labels it was asked for")
        if (plan.quotas.sum(axis=1) > tables.capacities[present]).any():
            raise RefusedError("malformed plan", "it asks for more than the devices can store")
        return plan
