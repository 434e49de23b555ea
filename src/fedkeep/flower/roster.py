"""Which node is which device: by its key, so that a device is the same after any restart."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol

import numpy as np

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import DeviceId, Profile, State

_SIMULATED_KEY_BYTES = 32
"""Flower's simulation gives its nodes random tokens of this size instead of keys."""

_NAME = 64
"""Characters of a device's name that are kept."""

Identity = Literal["key", "claim"]


class Node(Protocol):
    """What is read of Flower's NodeInfo."""

    @property
    def node_id(self) -> int: ...

    @property
    def public_key(self) -> bytes: ...


@dataclass(frozen=True, eq=False)
class Entry:
    """A device that has been seen: the digest of its node's key, and its profile when it was last planned for."""

    identity: str
    profile: Profile
    name: str = ""


class Roster:
    """All devices ever seen; a number belongs to the first key that claimed it."""

    def __init__(self, identity: Identity = "key") -> None:
        self._identity = identity
        self._entries: dict[DeviceId, Entry] = {}
        self._online: dict[int, DeviceId] = {}
        self._gone: set[int] = set()
        self._admitted: set[DeviceId] | None = None
        self.last_seen: dict[DeviceId, float] = {}
        """When each device was last online, in seconds since 1970; of this process's time only."""

    def admit(self, devices: Iterable[DeviceId]) -> None:
        """Lets only these take part until told otherwise; the others are known, and wait."""
        self._admitted = set(devices)

    def see(self, nodes: list[Node]) -> list[Node]:
        """Takes in who is online; returns those whose device is not known and must be asked."""
        by_key = {entry.identity: device for device, entry in self._entries.items()}
        before, self._online, self._gone = self._online, {}, set()
        unknown = []
        for node in nodes:
            device = before.get(node.node_id)
            if device is None and not self._by_claim(node):
                device = by_key.get(_digest(node))
            if device is None:
                unknown.append(node)
            else:
                self._online[node.node_id] = device
        self.last_seen |= dict.fromkeys(self._online.values(), time.time())
        return unknown

    def watch(self, nodes: Iterable[Node]) -> None:
        """Notes who is there in the middle of a round, for those who look on; who takes part in it stays as it was."""
        self._gone = set(self._online) - {node.node_id for node in nodes}
        self.last_seen |= dict.fromkeys(self.present(), time.time())

    def present(self) -> set[DeviceId]:
        """The devices that were there when somebody last looked."""
        return {device for node, device in self._online.items() if node not in self._gone}

    def enter(self, node: Node, device: DeviceId, profile: Profile, name: str = "") -> None:
        """Binds a node to the device number it claims; the profile of a device seen before is kept."""
        if device in self._online.values():
            raise RefusedError("identity-taken", f"device {device} is online at another node")
        known = self._entries.get(device)
        if known is None:
            self._entries[device] = Entry(_digest(node), profile, name[:_NAME])
        elif known.identity != _digest(node) and not self._by_claim(node):
            raise RefusedError("identity-taken", f"device {device} belongs to another key")
        self._online[node.node_id] = device
        self.last_seen[device] = time.time()

    def entries(self) -> dict[DeviceId, Entry]:
        """All devices ever seen."""
        return dict(sorted(self._entries.items()))

    def device(self, node_id: int) -> DeviceId | None:
        return self._online.get(node_id)

    def online(self) -> dict[DeviceId, int]:
        """The node of every device that is online."""
        return {device: node for node, device in sorted(self._online.items(), key=lambda item: item[1])}

    def nodes(self) -> dict[DeviceId, int]:
        """The node of every device that is online and may take part."""
        admitted = self._admitted
        return {device: node for device, node in self.online().items() if admitted is None or device in admitted}

    def profiles(self) -> dict[DeviceId, Profile]:
        """The profiles of the devices that are online."""
        return {device: self._entries[device].profile for device in self.online()}

    def drop(self, device: DeviceId) -> None:
        """Forgets a device whose profile was refused, so that it is asked again."""
        self._entries.pop(device, None)
        self._online = {node: d for node, d in self._online.items() if d != device}

    def snapshot(self) -> State:
        devices = sorted(self._entries)
        entries = [self._entries[device] for device in devices]
        velocities = [entry.profile.velocity for entry in entries]
        return {
            "devices": np.array(devices, dtype=np.int64),
            "identities": np.array([entry.identity for entry in entries], dtype="U32"),
            "names": np.array([entry.name for entry in entries], dtype=f"U{_NAME}"),
            "capacities": np.array([entry.profile.capacity for entry in entries], dtype=np.int64),
            "velocities": np.stack(velocities) if velocities else np.empty((0, 0)),
        }

    def restore(self, state: State) -> None:
        self._online = {}
        self._entries = {
            device: Entry(identity, Profile(capacity, velocity), name)
            for device, identity, name, capacity, velocity in zip(
                state["devices"].tolist(),
                state["identities"].tolist(),
                state["names"].tolist(),
                state["capacities"].tolist(),
                state["velocities"],
                strict=True,
            )
        }

    def _by_claim(self, node: Node) -> bool:
        return self._identity == "claim" or len(node.public_key) == _SIMULATED_KEY_BYTES


def _digest(node: Node) -> str:
    return blake2b(node.public_key or str(node.node_id).encode(), digest_size=16).hexdigest()
