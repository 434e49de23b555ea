"""What a plan could not give, told to the operator in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.fleet import Fleet
from fedkeep.core.quantities import Held
from fedkeep.core.types import DeviceId


@dataclass(frozen=True)
class Shortfall:
    """A label with fewer holders than wanted or, where `label` is None, devices with fewer slots than labels."""

    label: int | None
    wanted: int
    got: int
    reason: str
    devices: tuple[DeviceId, ...] = ()
    """The devices that lack slots."""

    def __str__(self) -> str:
        return self.tell()

    def tell(self, labels: Sequence[str] | None = None, devices: Sequence[str] | None = None) -> str:
        """The shortfall in a sentence, with names for labels and devices where there are any."""
        if self.label is not None:
            name = labels[self.label] if labels else self.label
            return f"label {name} has {self.got} of {self.wanted} holders: {self.reason}"
        named = [devices[device] if devices else str(device) for device in self.devices[:3]]
        more = [f"{len(self.devices) - 3} more"] if len(self.devices) > 3 else []
        return f"{self.got} of {self.wanted} labels fit on device {', '.join(named + more)}: {self.reason}"


def find_shortfalls(
    fleet: Fleet, held: Held, clients_per_label: int | None, labels_per_client: int | None
) -> tuple[Shortfall, ...]:
    """The labels that lack holders, then the devices that lack slots."""
    holders = held.sum(axis=0)
    short: list[Shortfall] = []
    for label in range(fleet.labels):
        wanted = max(1, int(fleet.owners[label])) if clients_per_label is None else clients_per_label
        if holders[label] < wanted:
            reason = _reason(int(fleet.owners[label]), int(holders[label]))
            short.append(Shortfall(label, wanted, int(holders[label]), reason))
    return (*short, *_crowded(fleet, labels_per_client))


def _reason(owners: int, holders: int) -> str:
    if owners == 0:
        return "no device sees it, so it has no weight until one does"
    if holders == owners:
        return f"no more than {owners} see it"
    reason = "the others that see it hold as many labels as they may"
    return reason if holders else f"{reason}, so it has no weight"


def _crowded(fleet: Fleet, labels_per_client: int | None) -> list[Shortfall]:
    """One shortfall for all devices whose capacity is smaller than the labels they would hold."""
    wanted = fleet.seen if labels_per_client is None else np.minimum(fleet.seen, labels_per_client)
    crowded = np.flatnonzero(fleet.capacities < wanted)
    if not len(crowded):
        return []
    fitting = int(fleet.capacities[crowded].sum())
    reason = "every label held needs a slot"
    return [Shortfall(None, int(wanted[crowded].sum()), fitting, reason, tuple(fleet.devices[crowded].tolist()))]
