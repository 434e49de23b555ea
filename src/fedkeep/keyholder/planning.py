"""How a server comes to plans that it cannot make: who was asked for which row, who answered, when to try again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from fedkeep.core.errors import FedkeepError, RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.types import DeviceId
from fedkeep.keyholder.parties import EncryptedFleet
from fedkeep.keyholder.planner import RemotePlanner
from fedkeep.link.messages import EncryptedProfile, ProfileRequest

log = logging.getLogger("fedkeep.keyholder")

_STRAGGLER_SECONDS = 30.0
"""How long a plan waits for a node that was asked and is silent."""
_RETRY_SECONDS = 5.0
"""Between two attempts to have a plan made."""


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
