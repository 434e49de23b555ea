"""Who is in the fleet: nodes that come and go, which device each is, what it declares, and the plan that follows.

A node is known by its key, so that a device is the same after any restart.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
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
from fedkeep.keyholder.planner import EncryptedPlanning, RemotePlanner
from fedkeep.link.messages import AskProfile
from fedkeep.link.wire import from_array, to_array

log = logging.getLogger("fedkeep.flower")

PROFILE_SECONDS = 120.0
"""How long a node that was asked for its profile may be silent before it is asked again."""
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
        unknown = self.roster.see(list(exchange.grid.get_nodes()))
        silent = [n for n in unknown if now - self._asked.get(n.node_id, (n, -PROFILE_SECONDS))[1] >= PROFILE_SECONDS]
        self._asked |= {node.node_id: (node, now) for node in silent}
        question = codec.encode(AskProfile())
        asking = [Message(question, node.node_id, PROFILE, ttl=PROFILE_SECONDS) for node in silent]
        exchange.send(asking, self.server.round)

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
    _nodes: dict[int, NodeInfo] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._planning = EncryptedPlanning(self.planner, self.sizes.regions, PROFILE_SECONDS)

    def meet(self, exchange: Exchange, now: float) -> None:
        """Sees who is online, and asks those whose answer is not there, if a new plan is needed."""
        self._nodes = {node.node_id: node for node in exchange.grid.get_nodes()}
        unknown = self.roster.see(list(self._nodes.values()))
        self._planning.see(self._nodes, now)
        if not unknown and set(self.roster.online()) == self._planned():
            return
        asked = self._planning.questions({node: self.roster.device(node) for node in self._nodes})
        messages = [
            Message(codec.encode(AskProfile(request)), node, PROFILE, ttl=PROFILE_SECONDS)
            for node, request in asked.items()
        ]
        exchange.send(messages, self.server.round)

    def introduce(self, asked: Asked, reply: Message) -> None:
        """Takes a node's encrypted profile; one that is in the clear or cannot be used is refused by name."""
        if not self._planning.awaits(asked.node):
            return
        try:
            self._seat(asked.node, reply)
        except RefusedError as error:
            self._planning.refuse(asked.node)
            known = self.roster.device(asked.node)
            self.refusals.add(Refusal(asked.node if known is None else known, error.reason, error.detail))

    def plan(self) -> None:
        """Has a plan made for the devices online that have answered, if they are not those of the present plan."""
        present = set(self.roster.online()) & self._planning.answered()
        least = self.min_devices if self.server.plan is None else 1
        if len(present) < least or present == self._planned() or self._planning.awaits_stragglers():
            return
        self._planning.plan(present, self.server.plan, self._adopt)

    def _adopt(self, plan: Plan) -> None:
        self.server.use_plan(plan)
        _tell(plan, "planned by the key-holder")

    def _seat(self, node: int, reply: Message) -> None:
        """Binds the node to the device it claims to be; its velocities are not known here, and say so."""
        answer, device, name = codec.decode_encrypted_profile(codec.content_of(reply))
        if self._planning.is_outdated(node, answer):
            return
        known = self.roster.device(node)
        if known is None:
            unread = Profile(answer.capacity, np.full(self.sizes.regions, np.nan))
            self.roster.enter(self._nodes[node], device, unread, name)
        elif known != device:
            raise RefusedError("identity-taken", f"device {known} says that it is device {device}")
        self._planning.receive(node, device, answer)
        log.info("device %d is node %d: capacity %d, velocities encrypted", device, node, answer.capacity)


def _tell(plan: Plan, how: str) -> None:
    log.info("%s for %d devices", how, len(plan.devices))
    for worst in plan.shortfalls[:1]:
        words = (len(plan.shortfalls), worst.label, worst.got, worst.wanted, worst.reason)
        log.warning("the plan falls short %d times, first for label %s: %d of %d, since %s", *words)
