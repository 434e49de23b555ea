"""Who is in the fleet: nodes that come and go, the profiles they declare, and the plan that follows them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedkeep.core.errors import RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.server import Refusal, Server
from fedkeep.core.types import DeviceId, Profile
from fedkeep.flower import codec
from fedkeep.flower.exchange import Asked, Exchange
from fedkeep.flower.roster import Node, Roster
from fedkeep.keyholder.planner import RemotePlanner
from fedkeep.keyholder.planning import EncryptedPlanning
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
        if not profiles or set(profiles) == _planned(self._server):
            return
        plan, refusals = self._server.coordinate(profiles)
        for refusal in refusals:
            self._refuse(refusal)
        for device in set(profiles) - _planned(self._server):
            self._roster.drop(device)
        log.info("planned for %d devices", len(plan.devices))
        if plan.shortfalls:
            worst = plan.shortfalls[0]
            words = (len(plan.shortfalls), worst.label, worst.got, worst.wanted, worst.reason)
            log.warning("the plan falls short %d times, first for label %s: %d of %d, since %s", *words)


class EncryptedMembership:
    """The same from profiles that nobody here can read: only devices in the key-holder's plan take part.

    While the key-holder does not answer, the present plan stays in force, and without one the run waits; nothing is
    ever asked for in the clear instead.
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
        self._planning, self._min_devices = EncryptedPlanning(planner, sizes.regions, PROFILE_SECONDS), min_devices
        self._nodes: dict[int, Node] = {}

    def meet(self, grid: Grid, exchange: Exchange, now: float) -> None:
        """Sees who is online, and asks those whose answer is not there, if a new plan is needed."""
        nodes = cast(list[Node], list(grid.get_nodes()))
        self._nodes = {node.node_id: node for node in nodes}
        unknown = self._roster.see(nodes)
        self._roster.admit(_planned(self._server))
        self._planning.see(self._nodes, now)
        if not unknown and set(self._roster.online()) == _planned(self._server):
            return
        asked = self._planning.questions({node: self._roster.device(node) for node in self._nodes})
        messages = [
            Message(codec.encode(AskProfile(request)), node, PROFILE, ttl=PROFILE_SECONDS)
            for node, request in asked.items()
        ]
        exchange.send(messages, self._server.round)

    def introduce(self, asked: Asked, reply: Message) -> None:
        """Takes a node's encrypted profile; one that is in the clear or cannot be used is refused by name."""
        if not self._planning.awaits(asked.node):
            return
        try:
            answer, device, name = codec.decode_encrypted_profile(codec.content_of(reply))
            if self._planning.is_outdated(asked.node, answer):
                return
            self._enter(self._nodes[asked.node], device, name, answer.capacity)
            self._planning.receive(asked.node, device, answer)
        except RefusedError as error:
            known = self._roster.device(asked.node)
            self._planning.refuse(asked.node)
            self._refuse(Refusal(asked.node if known is None else known, error.reason, error.detail))
            return
        log.info("device %d is node %d: capacity %d, velocities encrypted", device, asked.node, answer.capacity)

    def plan(self) -> None:
        """Has a plan made for the devices online that have answered, if they are not those of the present plan."""
        present = set(self._roster.online()) & self._planning.answered()
        least = self._min_devices if self._server.plan is None else 1
        if len(present) < least or present == _planned(self._server) or self._planning.awaits_stragglers():
            return
        self._planning.plan(present, self._server.plan, self._adopt)

    def _adopt(self, plan: Plan) -> None:
        self._server.use_plan(plan)
        self._roster.admit(_planned(self._server))
        log.info("planned by the key-holder for %d devices", len(plan.devices))
        for shortfall in plan.shortfalls[:1]:
            log.warning("the plan falls short %d times: %s", len(plan.shortfalls), shortfall)

    def _enter(self, node: Node, device: DeviceId, name: str, capacity: int) -> None:
        """Binds the node to the device it claims to be; its velocities are not known here, and say so."""
        known = self._roster.device(node.node_id)
        if known is None:
            self._roster.enter(node, device, Profile(capacity, np.full(self._sizes.regions, np.nan)), name)
        elif known != device:
            raise RefusedError("identity-taken", f"device {known} says that it is device {device}")


def _planned(server: Server) -> set[DeviceId]:
    return set() if server.plan is None else set(server.plan.devices.tolist())
