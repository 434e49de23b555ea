"""Who is in the fleet when the server cannot read profiles: encrypted answers, and plans from the key-holder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedkeep.core.errors import FedkeepError, RefusedError
from fedkeep.core.server import Refusal, Server
from fedkeep.core.types import DeviceId, Profile
from fedkeep.flower import codec
from fedkeep.flower.exchange import Asked, Exchange
from fedkeep.flower.membership import PROFILE, PROFILE_SECONDS
from fedkeep.flower.roster import Node, Roster
from fedkeep.keyholder.parties import EncryptedFleet
from fedkeep.keyholder.planner import RemotePlanner
from fedkeep.link.messages import AskProfile

log = logging.getLogger("fedkeep.flower")

_STRAGGLER_SECONDS = 30.0
"""How long a plan waits for a node that was asked and is silent."""
_RETRY_SECONDS = 5.0
"""Between two attempts to have a plan made."""


@dataclass(frozen=True)
class _Seat:
    """A node that was asked for one row of the present table."""

    node: Node
    row: int
    since: float
    refused: bool = False


class EncryptedMembership:
    """Asks devices to encrypt, keeps what it cannot read, and follows the key-holder's plan (steps 1, 2).

    Only devices in the plan take part. While the key-holder does not answer, the present plan stays in force, and
    without one the run waits; nothing is ever asked for in the clear instead.
    """

    def __init__(
        self,
        server: Server,
        roster: Roster,
        sizes: codec.Sizes,
        refuse: Callable[[Refusal], None],
        planner: RemotePlanner,
        min_devices: int,
    ) -> None:
        self._server, self._roster, self._sizes, self._refuse = server, roster, sizes, refuse
        self._planner, self._min_devices = planner, min_devices
        self._table: EncryptedFleet | None = None
        self._seats: dict[int, _Seat] = {}
        self._now = 0.0
        self._next_attempt = 0.0
        self._last_trouble = ""

    def meet(self, grid: Grid, exchange: Exchange, now: float) -> None:
        """Sees who is online, and asks those whose answer the present table lacks, if a new plan is needed."""
        self._now = now
        nodes = cast(list[Node], list(grid.get_nodes()))
        unknown = self._roster.see(nodes)
        self._roster.admit(self._planned())
        self._seats = {n: seat for n, seat in self._seats.items() if n in {node.node_id for node in nodes}}
        if not unknown and set(self._roster.online()) == self._planned():
            return
        asking = self._unanswered(nodes)
        if asking and self._attempt(lambda: self._make_room(nodes)):
            self._ask([node for node in self._unanswered(nodes) if self._is_due(node, now)], exchange, now)

    def introduce(self, asked: Asked, reply: Message) -> None:
        """Takes a node's encrypted profile; one that is in the clear or cannot be used is refused by name."""
        seat = self._seats.get(asked.node)
        if seat is None or self._table is None:
            return
        try:
            answer, device, name = codec.decode_encrypted_profile(codec.content_of(reply))
            if answer.row != seat.row and answer.name == self._table.name:
                return  # an answer to an older table; this one was asked for as well
            self._enter(seat.node, device, name, answer.capacity)
            self._table.receive(device, seat.row, answer)
        except RefusedError as error:
            known = self._roster.device(asked.node)
            self._seats[asked.node] = replace(seat, refused=True)
            self._refuse(Refusal(asked.node if known is None else known, error.reason, error.detail))
            return
        del self._seats[asked.node]
        log.info("device %d is node %d: capacity %d, velocities encrypted", device, asked.node, answer.capacity)

    def plan(self) -> None:
        """Has a plan made for the devices online that have answered, if they are not those of the present plan."""
        present = self._present()
        least = self._min_devices if self._server.plan is None else 1
        if len(present) < least or present == self._planned() or self._awaits_stragglers():
            return
        self._attempt(lambda: self._plan_for(present))

    def _plan_for(self, present: set[DeviceId]) -> None:
        assert self._table is not None
        plan = self._planner.plan(self._table.tables(present), self._server.plan)
        self._server.adopt(plan)
        self._roster.admit(self._planned())
        log.info("planned by the key-holder for %d devices", len(plan.devices))
        for shortfall in plan.shortfalls[:1]:
            log.warning("the plan falls short %d times: %s", len(plan.shortfalls), shortfall)

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

    def _make_room(self, nodes: list[Node]) -> None:
        """A table with a row for every node online, the present one if it has; a new one asks everybody anew."""
        taken = set() if self._table is None else set(self._table.answered.values())
        wanted = len(self._unanswered(nodes)) + len(taken)
        if self._table is None or wanted > self._table.rows:
            self._table = EncryptedFleet(self._planner.public_context(), len(nodes), self._sizes.regions)
            self._seats = {}
            log.info("a table of %d rows for %d nodes", self._table.rows, len(nodes))

    def _ask(self, nodes: list[Node], exchange: Exchange, now: float) -> None:
        assert self._table is not None
        taken = {*self._table.answered.values(), *(seat.row for seat in self._seats.values())}
        free = iter(row for row in range(self._table.rows) if row not in taken)
        messages = []
        for node in nodes:
            seated = self._seats.get(node.node_id)
            row = next(free) if seated is None else seated.row
            self._seats[node.node_id] = _Seat(node, row, now)
            content = codec.encode(AskProfile(self._table.request(row)))
            messages.append(Message(content, node.node_id, PROFILE, ttl=PROFILE_SECONDS))
        exchange.send(messages, self._server.round)

    def _enter(self, node: Node, device: DeviceId, name: str, capacity: int) -> None:
        """Binds the node to the device it claims to be; its velocities are not known here, and say so."""
        known = self._roster.device(node.node_id)
        if known is None:
            self._roster.enter(node, device, Profile(capacity, np.full(self._sizes.regions, np.nan)), name)
        elif known != device:
            raise RefusedError("identity-taken", f"device {known} says that it is device {device}")

    def _unanswered(self, nodes: list[Node]) -> list[Node]:
        answered = {} if self._table is None else self._table.answered
        return [node for node in nodes if self._roster.device(node.node_id) not in answered]

    def _is_due(self, node: Node, now: float) -> bool:
        seat = self._seats.get(node.node_id)
        return seat is None or now - seat.since >= PROFILE_SECONDS

    def _awaits_stragglers(self) -> bool:
        recent = (seat for seat in self._seats.values() if self._now - seat.since < _STRAGGLER_SECONDS)
        return any(not seat.refused for seat in recent)

    def _present(self) -> set[DeviceId]:
        return set() if self._table is None else set(self._roster.online()) & set(self._table.answered)

    def _planned(self) -> set[DeviceId]:
        return set() if self._server.plan is None else set(self._server.plan.devices.tolist())
