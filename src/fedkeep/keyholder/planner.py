"""How a server comes to plans that it cannot make: from the key-holder, which alone can read the tables they need.

Who was asked for which row, who answered, and when to try again is kept here, too.
"""

import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedkeep.core.coordination import Coordinator, Greedy
from fedkeep.core.errors import ConfigError, FedkeepError, RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.types import DeviceId
from fedkeep.keyholder import port
from fedkeep.keyholder.parties import EncryptedFleet, PublicContext
from fedkeep.link.addresses import Address
from fedkeep.link.framing import receive_frame, send_frame
from fedkeep.link.messages import Answer, EncryptedProfile, ProfileRequest, expect
from fedkeep.link.wire import from_bytes, to_bytes

log = logging.getLogger("fedkeep.keyholder")

_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 30.0
"""Longer than the key-holder gives to whoever is silent: it may have to see some of them off first."""
_ANSWER_SECONDS = 300.0
_STRAGGLER_SECONDS = 30.0
"""How long a plan waits for a node that was asked and is silent."""
_RETRY_SECONDS = 5.0
"""Between two attempts to have a plan made."""


class KeyHolderUnreachableError(FedkeepError):
    """Nobody answers at the key-holder's address, or not as the key-holder."""


class KeyHolderClient:
    """The key-holder at an address; without TLS on loopback only."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        if tls is None and not address.is_loopback:
            raise ConfigError(f"without TLS the key-holder must be on loopback, and {address} is not")
        self.address, self._tls = address, tls

    def ask(self, request: port.KeyRequest, expected: type[Answer]) -> Answer:
        """The key-holder's reply, which must be of that kind; its refusal is raised."""
        try:
            payload = self._exchange(to_bytes(request))
        except (OSError, EOFError) as error:
            why = getattr(error, "strerror", None) or error
            raise KeyHolderUnreachableError(f"the key-holder at {self.address} does not answer ({why})") from error
        return expect(from_bytes(payload, port.KeyReply), expected, "the key-holder")

    def _exchange(self, payload: bytes) -> bytes:
        with contextlib.ExitStack() as stack:
            where = (self.address.host, self.address.port)
            plain = stack.enter_context(socket.create_connection(where, _CONNECT_SECONDS))
            plain.settimeout(_HANDSHAKE_SECONDS)
            connection = plain
            if self._tls is not None:
                secure = stack.enter_context(self._tls.wrap_socket(plain, server_hostname=self.address.host))
                if port.peer_name(secure) != port.KEYHOLDER:
                    raise ssl.SSLError(0, f"its certificate is not the {port.KEYHOLDER}'s")
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
        tls = None if self.insecure else port.planner_side(Path(self.credentials))
        return KeyHolderClient(Address.parse(self.address), tls)


class RemotePlanner:
    """Greedy plans, made by the key-holder; other coordinators need velocities, which nobody can read."""

    def __init__(self, client: KeyHolderClient, coordinator: Coordinator) -> None:
        if not isinstance(coordinator, Greedy):
            raise ConfigError("encrypted profiles are planned by coordinator 'greedy' only")
        self._client, self._greedy = client, coordinator

    def public_context(self) -> PublicContext:
        """The keys to multiply under encryption: some hundred megabytes, asked for once a table."""
        return PublicContext.unpack(self._client.ask(port.AskPublicKeys(), port.PublishedKeys).packed)

    def plan(self, tables: port.EncryptedTables, before: Plan | None) -> Plan:
        """The plan for the devices of the tables; one for others, or for more slots than they have, is refused."""
        greedy = self._greedy
        asked = port.AskPlan(tables, greedy.quantities, greedy.clients_per_label, greedy.labels_per_client, before)
        plan = port.sound_plan(self._client.ask(asked, port.Planned).plan)
        present = np.flatnonzero(tables.capacities > 0)
        present = present[np.argsort(tables.devices[present])]
        if not np.array_equal(plan.devices, tables.devices[present]) or plan.quotas.shape[1] != tables.labels:
            raise RefusedError("malformed plan", "it is not for the devices and labels it was asked for")
        if (plan.quotas.sum(axis=1) > tables.capacities[present]).any():
            raise RefusedError("malformed plan", "it asks for more than the devices can store")
        return plan


@dataclass(frozen=True)
class _Seat:
    """A node that was asked for one row of the present table."""

    row: int
    since: float
    refused: bool = False


class EncryptedPlanning:
    """One table of encrypted profiles at a time, a row for each node, and the plans that the key-holder makes of it.

    Nodes are numbers here; who may speak for which device is the caller's to know. What fails is tried again later.
    """

    def __init__(self, planner: RemotePlanner, labels: int, ask_again_seconds: float) -> None:
        self._planner, self._labels, self._ask_again = planner, labels, ask_again_seconds
        self._table: EncryptedFleet | None = None
        self._seats: dict[int, _Seat] = {}
        self._now = self._next_attempt = 0.0
        self._last_trouble = ""

    def see(self, nodes: Iterable[int], now: float) -> None:
        """Takes in who is online; whoever left loses a row that it has not filled."""
        self._now = now
        here = set(nodes)
        self._seats = {node: seat for node, seat in self._seats.items() if node in here}

    def questions(self, nodes: Mapping[int, DeviceId | None]) -> dict[int, ProfileRequest]:
        """What to ask of which node: of those whose answer the present table lacks and that are not silent yet.

        Where the table has too few rows, a new one asks everybody anew.
        """
        if not self._unanswered(nodes) or not self._attempt(lambda: self._make_room(nodes)):
            return {}
        assert self._table is not None
        taken = {*self._table.answered.values(), *(seat.row for seat in self._seats.values())}
        free = iter(row for row in range(self._table.rows) if row not in taken)
        asked = {}
        for node in self._unanswered(nodes):
            seat = self._seats.get(node)
            if seat is None or self._now - seat.since >= self._ask_again:
                row = next(free) if seat is None else seat.row
                self._seats[node] = _Seat(row, self._now)
                asked[node] = self._table.request(row)
        return asked

    def awaits(self, node: int) -> bool:
        return self._table is not None and node in self._seats

    def is_outdated(self, node: int, answer: EncryptedProfile) -> bool:
        """Whether it answers an older table; this one was asked for as well."""
        return self._table is not None and answer.name == self._table.name and answer.row != self._seats[node].row

    def receive(self, node: int, device: DeviceId, answer: EncryptedProfile) -> None:
        """Keeps a node's answer; raises where it cannot be used."""
        assert self._table is not None
        self._table.receive(device, self._seats[node].row, answer)
        del self._seats[node]

    def refuse(self, node: int) -> None:
        """No plan waits for this node."""
        self._seats[node] = replace(self._seats[node], refused=True)

    def answered(self) -> set[DeviceId]:
        """The devices in the present table."""
        return set() if self._table is None else set(self._table.answered)

    def awaits_stragglers(self) -> bool:
        recent = (seat for seat in self._seats.values() if self._now - seat.since < _STRAGGLER_SECONDS)
        return any(not seat.refused for seat in recent)

    def plan(self, present: set[DeviceId], before: Plan | None, adopt: Callable[[Plan], None]) -> None:
        """Has the key-holder plan for these devices, and hands the plan on."""
        table = self._table
        assert table is not None
        self._attempt(lambda: adopt(self._planner.plan(table.tables(present), before)))

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Whether it could be done; else why not is said once, and it is tried again later."""
        if self._now < self._next_attempt:
            return False
        try:
            action()
        except FedkeepError as error:
            self._next_attempt = self._now + _RETRY_SECONDS
            if str(error) != self._last_trouble:
                log.warning("no plan from encrypted profiles yet: %s; trying again, and nothing in the clear", error)
            self._last_trouble = str(error)
            if isinstance(error, RefusedError) and error.reason == "another key":
                self._table, self._seats = None, {}
            return False
        self._last_trouble = ""
        return True

    def _make_room(self, nodes: Mapping[int, DeviceId | None]) -> None:
        """A table with a row for every node online: the present one if it has."""
        taken = 0 if self._table is None else len(self._table.answered)
        if self._table is None or len(self._unanswered(nodes)) + taken > self._table.rows:
            self._table = EncryptedFleet(self._planner.public_context(), len(nodes), self._labels)
            self._seats = {}
            log.info("a table of %d rows for %d nodes", self._table.rows, len(nodes))

    def _unanswered(self, nodes: Mapping[int, DeviceId | None]) -> list[int]:
        answered = self.answered()
        return [node for node, device in nodes.items() if device not in answered]
