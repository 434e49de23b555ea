"""Who is in the fleet: nodes that come and go, the profiles they declare, and the plan that follows them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

from flwr.app import Message
from flwr.serverapp import Grid

from fedkeep.core.errors import RefusedError
from fedkeep.core.server import Refusal, Server
from fedkeep.core.types import DeviceId
from fedkeep.flower import codec
from fedkeep.flower.exchange import Asked, Exchange
from fedkeep.flower.roster import Node, Roster
from fedkeep.link.messages import AskProfile

log = logging.getLogger("fedkeep.flower")

PROFILE = "query.profile"
PROFILE_SECONDS = 120.0
"""How long a node that was asked for its profile may be silent before it is asked again."""


class Membership:
    """Asks newcomers for their profiles, and plans anew when the set of devices changes (steps 1, 2)."""

    def __init__(self, server: Server, roster: Roster, sizes: codec.Sizes, refuse: Callable[[Refusal], None]) -> None:
        self._server, self._roster, self._sizes, self._refuse = server, roster, sizes, refuse
        self._asked: dict[int, tuple[Node, float]] = {}

    def meet(self, grid: Grid, exchange: Exchange, now: float) -> None:
        """Sees who is online and asks those nobody knows."""
        unknown = self._roster.see(cast(list[Node], list(grid.get_nodes())))
        silent = [n for n in unknown if now - self._asked.get(n.node_id, (n, -PROFILE_SECONDS))[1] >= PROFILE_SECONDS]
        self._asked |= {node.node_id: (node, now) for node in silent}
        question = codec.encode(AskProfile())
        asking = [Message(question, node.node_id, PROFILE, ttl=PROFILE_SECONDS) for node in silent]
        exchange.send(asking, self._server.round)

    def introduce(self, asked: Asked, reply: Message) -> None:
        """Takes a node's profile; one that cannot be read is refused and asked for again later."""
        node, _ = self._asked.get(asked.node, (None, 0.0))
        if node is None:
            return
        try:
            profile, device, name = codec.decode_profile(codec.content_of(reply), self._sizes)
            self._roster.enter(node, device, profile, name)
        except RefusedError as error:
            self._refuse(Refusal(asked.node, error.reason, error.detail))
            return
        del self._asked[asked.node]
        words = (device, name, asked.node, profile.capacity, profile.rate)
        log.info("device %d (%s) is node %d: capacity %d, rate %g", *words)
        if not profile.rate > 0:
            log.warning("device %d sees no samples: it is given none to store", device)

    def plan(self) -> None:
        """Plans for the devices online, if they are not those of the present plan."""
        profiles = self._roster.profiles()
        if not profiles or set(profiles) == self._planned():
            return
        plan, refusals = self._server.coordinate(profiles)
        for refusal in refusals:
            self._refuse(refusal)
        for device in set(profiles) - self._planned():
            self._roster.drop(device)
        log.info("planned for %d devices", len(plan.devices))
        if plan.shortfalls:
            worst = plan.shortfalls[0]
            words = (len(plan.shortfalls), worst.label, worst.got, worst.wanted, worst.reason)
            log.warning("the plan falls short %d times, first for label %s: %d of %d, since %s", *words)

    def _planned(self) -> set[DeviceId]:
        return set() if self._server.plan is None else set(self._server.plan.devices.tolist())
