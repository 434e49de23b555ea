"""Who is in the fleet: nodes that come and go, which device each is, what it declares, and the plan that follows.

A node is known by its key, so that a device is the same after any restart.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo

from fedkeep.core.errors import RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.rounds import Refusal
from fedkeep.core.server import Server
from fedkeep.core.types import DeviceId, Profile, State
from fedkeep.flower import codec
from fedkeep.flower.codec import PROFILE
from fedkeep.flower.exchange import Asked, Exchange
from fedkeep.flower.rounds import Refusals
from fedkeep.keyholder.planner import RemotePlanner
from fedkeep.link.messages import AskProfile
from fedkeep.link.wire import from_array, to_array

log = logging.getLogger("fedkeep.flower")

PROFILE_SECONDS = 120.0
"""How long a node that was asked for its profile may be silent before it is asked again."""
_STRAGGLER_SECONDS = 30.0
"""How long a plan from sealed profiles waits for a node that was asked and is silent."""
_SIMULATED_KEY_BYTES = 32
"""Flower's simulation gives its nodes random tokens of this size instead of keys."""
_NAME_LENGTH = 64


@dataclass(frozen=True, eq=False)
class Entry:
    """A device that has been seen: the digest of its node's key, and its profile when it was last planned for."""

    identity: str
    profile: Profile
    name: str = ""


class Roster:
    """All devices ever seen; a number belongs to the first key that claimed it."""

    def __init__(self, identity: str) -> None:
        self._identity = identity
        self.entries: dict[DeviceId, Entry] = {}
        self._online: dict[int, DeviceId] = {}
        self._gone: set[int] = set()
        self.last_seen: dict[DeviceId, float] = {}
        """When each device was last online, in seconds since 1970; of this process's time only."""

    def see(self, nodes: list[NodeInfo]) -> list[NodeInfo]:
        """Takes in who is online; returns those whose device is not known and must be asked."""
        by_key = {entry.identity: device for device, entry in self.entries.items()}
        before, self._online, self._gone = self._online, {}, set()
        for node in nodes:
            device = before.get(node.node_id)
            if device is None and not self._by_claim(node):
                device = by_key.get(_digest(node))
            if device is not None:
                self._online[node.node_id] = device
        self.last_seen |= dict.fromkeys(self._online.values(), time.time())
        return [node for node in nodes if node.node_id not in self._online]

    def watch(self, nodes: Iterable[NodeInfo]) -> None:
        """Notes who is there in the middle of a round, for those who look on; who takes part in it stays as it was."""
        self._gone = set(self._online) - {node.node_id for node in nodes}
        self.last_seen |= dict.fromkeys(self.present(), time.time())

    def present(self) -> set[DeviceId]:
        """The devices that were there when somebody last looked."""
        return {device for node, device in self._online.items() if node not in self._gone}

    def enter(self, node: NodeInfo, device: DeviceId, profile: Profile, name: str = "") -> None:
        """Binds a node to the device number it claims; the profile of a device seen before is kept."""
        if device in self._online.values():
            raise RefusedError("identity-taken", f"device {device} is online at another node")
        known = self.entries.setdefault(device, Entry(_digest(node), profile, name[:_NAME_LENGTH]))
        if known.identity != _digest(node) and not self._by_claim(node):
            raise RefusedError("identity-taken", f"device {device} belongs to another key")
        self._online[node.node_id] = device
        self.last_seen[device] = time.time()

    def device(self, node_id: int) -> DeviceId | None:
        return self._online.get(node_id)

    def online(self) -> dict[DeviceId, int]:
        """The node of every device that is online."""
        return {device: node for node, device in sorted(self._online.items(), key=lambda item: item[1])}

    def profiles(self) -> dict[DeviceId, Profile]:
        """The profiles of the devices that are online."""
        return {device: self.entries[device].profile for device in self.online()}

    def know_slots(self, plan: Plan) -> None:
        """Takes what a plan gives to devices for their capacities, which they told the key-holder alone."""
        for device, slots in zip(plan.devices.tolist(), plan.quotas.sum(axis=1).tolist(), strict=True):
            known = self.entries[device]
            self.entries[device] = replace(known, profile=replace(known.profile, capacity=slots))

    def drop(self, device: DeviceId) -> None:
        """Forgets a device whose profile was refused, so that it is asked again."""
        self.entries.pop(device, None)
        self._online = {node: d for node, d in self._online.items() if d != device}

    def snapshot(self) -> State:
        known = sorted(self.entries.items())
        velocities = np.stack([e.profile.velocity for _, e in known]) if known else np.empty((0, 0))
        entries = to_array([(d, e.identity, e.name, e.profile.capacity) for d, e in known])
        return {"entries": entries, "velocities": velocities}

    def restore(self, state: State) -> None:
        self._online = {}
        entries = from_array(state["entries"], list[tuple[int, str, str, int]])
        self.entries = {
            device: Entry(identity, Profile(capacity, velocity), name)
            for (device, identity, name, capacity), velocity in zip(entries, state["velocities"], strict=True)
        }

    def _by_claim(self, node: NodeInfo) -> bool:
        return self._identity == "claim" or len(node.public_key) == _SIMULATED_KEY_BYTES


def _digest(node: NodeInfo) -> str:
    return blake2b(node.public_key or str(node.node_id).encode(), digest_size=16).hexdigest()


@dataclass(eq=False)
class Membership:
    """Asks newcomers for their profiles, and plans anew when the set of devices changes (steps 1, 2)."""

    server: Server
    roster: Roster
    sizes: codec.Sizes
    refusals: Refusals
    _asked: dict[int, tuple[NodeInfo, float]] = field(default_factory=dict, init=False)

    def nodes(self) -> dict[DeviceId, int]:
        """The node of every device that is online and planned for: of those that may take part."""
        planned = self._planned()
        return {device: node for device, node in self.roster.online().items() if device in planned}

    def meet(self, exchange: Exchange, now: float) -> None:
        """Sees who is online and asks those nobody knows."""
        self._ask(exchange, self.roster.see(list(exchange.grid.get_nodes())), AskProfile(), now)

    def introduce(self, asked: Asked, reply: Message) -> None:
        """Takes a node's profile; one that cannot be read is refused and asked for again later."""
        if asked.node not in self._asked:
            return
        with self.refusals.naming(asked.node):
            profile, device, name = codec.decode_profile(codec.content_of(reply), self.sizes)
            self.roster.enter(self._asked[asked.node][0], device, profile, name)
            del self._asked[asked.node]
            words = (device, name, asked.node, profile.capacity, profile.rate)
            log.info("device %d (%s) is node %d: capacity %d, rate %g", *words)
            if not profile.rate > 0:
                log.warning("device %d sees no samples: it is given none to store", device)

    def plan(self) -> None:
        """Plans for the devices online, if they are not those of the present plan."""
        profiles = self.roster.profiles()
        if not profiles or set(profiles) == self._planned():
            return
        plan, refusals = self.server.coordinate(profiles)
        self.refusals.add(*refusals)
        for device in set(profiles) - self._planned():
            self.roster.drop(device)
        _tell(plan, "planned")

    def _ask(self, exchange: Exchange, nodes: Iterable[NodeInfo], question: AskProfile, now: float) -> None:
        """Asks the nodes, but for those that were asked a short time ago."""
        silent = [n for n in nodes if now - self._asked.get(n.node_id, (n, -PROFILE_SECONDS))[1] >= PROFILE_SECONDS]
        self._asked |= {node.node_id: (node, now) for node in silent}
        content = codec.encode(question)
        asking = [Message(content, node.node_id, PROFILE, ttl=PROFILE_SECONDS) for node in silent]
        exchange.send(asking, self.server.round)

    def _planned(self) -> set[DeviceId]:
        return set() if self.server.plan is None else set(self.server.plan.devices.tolist())


@dataclass(eq=False)
class EncryptedMembership(Membership):
    """The same from profiles that nobody here can read: only devices in the key-holder's plan take part.

    While the key-holder does not answer, the present plan stays in force, and without one the run waits; nothing is
    ever asked for in the clear instead.
    """

    planner: RemotePlanner
    min_devices: int
    _nonce: bytes = field(default=b"", init=False)
    _now: float = field(default=0.0, init=False)
    _refused: set[int] = field(default_factory=set, init=False)
    """Nodes for which no plan waits."""

    def meet(self, exchange: Exchange, now: float) -> None:
        """Sees who is online, and asks those whose answer is not there, if a new plan is needed."""
        nodes = {node.node_id: node for node in exchange.grid.get_nodes()}
        unknown = self.roster.see(list(nodes.values()))
        self._now, self._asked = now, {node: asked for node, asked in self._asked.items() if node in nodes}
        if not unknown and set(self.roster.online()) == self._planned():
            return
        if (request := self.planner.request(now)) is None:
            return
        if request.nonce != self._nonce:
            self._nonce, self._asked, self._refused = request.nonce, {}, set()
        self._ask(exchange, [node for node in nodes.values() if self._lacks(node.node_id)], AskProfile(request), now)

    def introduce(self, asked: Asked, reply: Message) -> None:
        """Takes a node's sealed profile, and binds the node to the device it claims to be."""
        if asked.node not in self._asked:
            return
        known = self.roster.device(asked.node)
        try:
            said, device = codec.decode_encrypted_profile(codec.content_of(reply), self.sizes)
            if said.nonce != self._nonce:
                return  # it answers an earlier request, and was asked for this one as well
            if known is None:
                unread = Profile(0, np.full(self.sizes.regions, np.nan))
                self.roster.enter(self._asked[asked.node][0], device, unread, said.name)
            elif known != device:
                raise RefusedError("identity-taken", f"device {known} says that it is device {device}")
        except RefusedError as error:
            self._refused.add(asked.node)
            self.refusals.add(Refusal(asked.node if known is None else known, error.reason, error.detail))
            return
        self.planner.profiles[device] = said.profile
        log.info("device %d (%s) is node %d: its profile is sealed", device, said.name, asked.node)

    def plan(self) -> None:
        """Has a plan made for the devices online that have answered, if they are not those of the present plan.

        Whose profile the key-holder cannot use is named, left out, and asked again later.
        """
        online = self.roster.online()
        present = online.keys() & self.planner.profiles.keys()
        least = self.min_devices if self.server.plan is None else 1
        if len(present) < least or present == self._planned() or self._awaits_stragglers():
            return
        planned = self.planner.plan(self._now, present, self.server.plan, self.sizes.regions)
        if planned is None:
            return
        self.refusals.add(*planned.refused)
        for refusal in planned.refused:
            self._refused.add(online[refusal.device])
            del self.planner.profiles[refusal.device]
        self.server.use_plan(planned.plan)
        self.roster.know_slots(planned.plan)
        _tell(planned.plan, "planned by the key-holder")

    def _awaits_stragglers(self) -> bool:
        recent = (node for node, (_, since) in self._asked.items() if self._now - since < _STRAGGLER_SECONDS)
        return any(self._lacks(node) and node not in self._refused for node in recent)

    def _lacks(self, node: int) -> bool:
        return self.roster.device(node) not in self.planner.profiles


def _tell(plan: Plan, how: str) -> None:
    log.info("%s for %d devices", how, len(plan.devices))
    for worst in plan.shortfalls[:1]:
        words = (len(plan.shortfalls), worst.label, worst.got, worst.wanted, worst.reason)
        log.warning("the plan falls short %d times, first for label %s: %d of %d, since %s", *words)
