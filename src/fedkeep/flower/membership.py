"""Who is in the fleet: nodes and their devices, what they declare, and the plan for them.

A node is known by its key, so that a device is the same after any restart.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo

from fedkeep.core.errors import RejectedError, RejectionReason
from fedkeep.core.server import Server
from fedkeep.core.types import DeviceId, Profile, State
from fedkeep.flower import codec
from fedkeep.flower.codec import PROFILE
from fedkeep.flower.exchange import Exchange, PendingRequest
from fedkeep.flower.rounds import Rejections, RoundOptions
from fedkeep.keyholder.service import RemotePlanner
from fedkeep.protocol.messages import AskProfile
from fedkeep.protocol.wire import from_array, to_array

log = logging.getLogger("fedkeep.flower")

_PROFILE_SECONDS = 120.0
"""How long a node that was asked for its profile may be silent before it is asked again."""
_STRAGGLER_SECONDS = 30.0
"""How long a plan from sealed profiles waits for a node that was asked and is silent."""
_SIMULATED_KEY_BYTES = 32
"""Flower's simulation gives its nodes random tokens of this size instead of keys."""
_NAME_LENGTH = 64


@dataclass(frozen=True, eq=False)
class Entry:
    """A device that has been seen: the digest of its node's key, and its latest profile."""

    identity: str
    profile: Profile
    name: str = ""


@dataclass(eq=False)
class Membership:
    """All devices ever seen; newcomers are asked for profiles and planned for (steps 1, 2).

    A number belongs to the first key that claimed it. With a `planner` profiles are sealed, and
    only devices in the key-holder's plan take part: while it does not answer, the present plan
    stays in force, and without one the run waits; nothing is ever asked for in the clear instead.
    """

    server: Server
    options: RoundOptions
    rejections: Rejections
    planner: RemotePlanner | None = None
    agreement: Mapping[str, str] | None = None
    """What devices must have configured like this fleet; None: it is not checked."""
    entries: dict[DeviceId, Entry] = field(default_factory=dict, init=False)
    online: dict[int, DeviceId] = field(default_factory=dict, init=False)
    """The devices at the nodes that may take part in a round."""
    present: set[DeviceId] = field(default_factory=set, init=False)
    """The devices that were there when somebody last looked."""
    last_seen: dict[DeviceId, float] = field(default_factory=dict, init=False)
    """When each device was last online, in seconds since 1970; of this process's time only."""
    _asked: dict[int, tuple[NodeInfo, float]] = field(default_factory=dict, init=False)
    _awaited: set[int] = field(default_factory=set, init=False)
    _nonce: bytes = field(default=b"", init=False)

    def nodes(self) -> dict[DeviceId, int]:
        """Return the node of every device that may take part: online, and planned for."""
        planned = self._planned()
        return dict(
            sorted((device, node) for node, device in self.online.items() if device in planned)
        )

    def watch(self, nodes: Iterable[int]) -> None:
        """Note who is online in the middle of a round; who takes part in it stays as it was."""
        self.present = {self.online[node] for node in nodes if node in self.online}
        self.last_seen |= dict.fromkeys(self.present, time.time())

    def poll(self, exchange: Exchange) -> None:
        """See who is online, and ask those whose profile is missing.

        Sealed profiles are asked for only if a new plan is needed.

        A device that was seen before is known by its key.
        """
        now, nodes = time.monotonic(), {node.node_id: node for node in exchange.grid.get_nodes()}
        self._asked = {node: asked for node, asked in self._asked.items() if node in nodes}
        by_key = {entry.identity: device for device, entry in self.entries.items()}
        before, self.online = self.online, {}
        for number, node in nodes.items():
            known = None if self._by_claim(node) else by_key.get(_digest(node))
            if (device := before.get(number, known)) is not None:
                self.online[number] = device
        self.watch(nodes)
        lacking, request = [node for node in nodes if node not in self.online], None
        if self.planner is not None:
            if not lacking and set(self.online.values()) == self._planned():
                return
            if (request := self.planner.request(now)) is None:
                return
            if request.nonce != self._nonce:
                self._nonce, self._asked = request.nonce, {}
            lacking = [node for node in nodes if self.online.get(node) not in self.planner.profiles]
        asking = [
            n
            for n in lacking
            if n not in self._asked or now - self._asked[n][1] >= _PROFILE_SECONDS
        ]
        self._asked |= {node: (nodes[node], now) for node in asking}
        self._awaited.update(asking)
        content = codec.encode(AskProfile(request))
        messages = [Message(content, node, PROFILE, ttl=_PROFILE_SECONDS) for node in asking]
        exchange.send(messages, self.server.round)

    def register(self, asked: PendingRequest, reply: Message) -> None:
        """Take a node's profile, and bind the node to the device it claims to be.

        One that cannot be read is rejected and asked for again later.
        """
        if asked.node not in self._asked:
            return
        known = self.online.get(asked.node)
        with self.rejections.attributed_to(asked.node if known is None else known):
            content = codec.content_of(reply)
            if self.planner is None:
                profile, device, name = codec.decode_profile(
                    content, self.server.regions, self.agreement
                )
                self._bind(asked.node, device, profile, name)
                words = f"capacity {profile.capacity}, rate {profile.rate:g}"
                if not profile.rate > 0:
                    log.warning("device %d sees no samples: it is given none to store", device)
            else:
                message, device = codec.decode_encrypted_profile(
                    content, self.server.regions, self.agreement
                )
                if message.nonce != self._nonce:
                    return  # it answers an earlier request, and was asked for this one as well
                unknown = Profile(0, np.full(self.server.regions, np.nan))
                self._bind(asked.node, device, unknown, message.name)
                self.planner.profiles[device] = message.profile
                name, words = message.name, "its profile is sealed"
            log.info("device %d (%s) is node %d: %s", device, name, asked.node, words)
        self._awaited.discard(asked.node)

    def plan(self) -> None:
        """Have a plan made for the devices online, if they are not those of the present plan.

        Whose profile cannot be used is named, left out, and asked again later.
        """
        now, planner = time.monotonic(), self.planner
        nodes = {device: node for node, device in self.online.items()}
        present = nodes.keys() if planner is None else nodes.keys() & planner.profiles.keys()
        least = 1 if planner is None or self.server.plan is not None else self.options.min_devices
        if len(present) < least or present == self._planned():
            return
        if planner is None:
            plan, rejected = self.server.coordinate(
                {device: self.entries[device].profile for device in nodes}
            )
            for device in present - set(plan.devices.tolist()):
                del self.entries[device], self.online[nodes[device]]
                self._asked.pop(nodes[device], None)
        else:
            if any(
                now - self._asked[n][1] < _STRAGGLER_SECONDS
                for n in self._awaited & self._asked.keys()
            ):
                return
            if (
                planned := planner.plan(now, present, self.server.plan, self.server.regions)
            ) is None:
                return
            plan, rejected = planned.plan, planned.refused
            for rejection in rejected:
                del planner.profiles[rejection.device]
            self.server.use_plan(plan)
            for device, slots in zip(
                plan.devices.tolist(), plan.quotas.sum(axis=1).tolist(), strict=True
            ):
                known = self.entries[
                    device
                ]  # its slots stand for its capacity, which the key-holder alone was told
                self.entries[device] = replace(
                    known, profile=replace(known.profile, capacity=slots)
                )
        self.rejections.add(*rejected)
        log.info("planned for %d devices", len(plan.devices))
        for worst in plan.shortfalls[:1]:
            words = (len(plan.shortfalls), worst.label, worst.got, worst.wanted, worst.reason)
            log.warning(
                "the plan falls short %d times, first for label %s: %d of %d, since %s", *words
            )

    def snapshot(self) -> State:
        """Return the devices ever seen as plain arrays."""
        known = sorted(self.entries.items())
        velocities = np.stack([e.profile.velocity for _, e in known]) if known else np.empty((0, 0))
        entries = to_array([(d, e.identity, e.name, e.profile.capacity) for d, e in known])
        return {"entries": entries, "velocities": velocities}

    def restore(self, state: State) -> None:
        """Take over what `snapshot` returned; nobody is online yet."""
        self.online = {}
        entries = from_array(state["entries"], list[tuple[int, str, str, int]])
        self.entries = {
            device: Entry(identity, Profile(capacity, velocity), name)
            for (device, identity, name, capacity), velocity in zip(
                entries, state["velocities"], strict=True
            )
        }

    def _bind(self, number: int, device: DeviceId, profile: Profile, name: str) -> None:
        """Binds a node to the device it claims to be; a known device keeps its profile."""
        bound, node = self.online.get(number), self._asked[number][0]
        if bound is not None and bound != device:
            raise RejectedError(
                RejectionReason.IDENTITY_TAKEN, f"device {bound} says that it is device {device}"
            )
        if bound is None and device in self.online.values():
            raise RejectedError(
                RejectionReason.IDENTITY_TAKEN, f"device {device} is online at another node"
            )
        known = self.entries.setdefault(device, Entry(_digest(node), profile, name[:_NAME_LENGTH]))
        if known.identity != _digest(node) and not self._by_claim(node):
            raise RejectedError(
                RejectionReason.IDENTITY_TAKEN, f"device {device} belongs to another key"
            )
        self.online[number] = device
        self.present.add(device)
        self.last_seen[device] = time.time()

    def _planned(self) -> set[DeviceId]:
        return set() if self.server.plan is None else set(self.server.plan.devices.tolist())

    def _by_claim(self, node: NodeInfo) -> bool:
        return self.options.identity == "claim" or len(node.public_key) == _SIMULATED_KEY_BYTES


def _digest(node: NodeInfo) -> str:
    return blake2b(node.public_key or str(node.node_id).encode(), digest_size=16).hexdigest()
