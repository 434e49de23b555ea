"""The plan: quotas D for every device, what a stored sample counts, and what could not be given."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.fleet import Fleet
from fedkeep.core.quantities import Held
from fedkeep.core.types import AnyArray, Assignment, DeviceId, FloatArray, IntArray, State
from fedkeep.core.weighting import label_weights


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


@dataclass(frozen=True, eq=False)
class Plan:
    """D, gamma and what was lacking; quotas are small integers, since fleets may be large."""

    devices: IntArray
    """(C,), ascending."""
    quotas: AnyArray
    """D, (C, Y): the slots of each device for each region."""
    label_weights: FloatArray
    """gamma (Eq. 11), zero for a region nobody holds."""
    mass_per_slot: float
    shortfalls: tuple[Shortfall, ...] = ()

    def assignment(self, device: DeviceId) -> Assignment:
        """What this device is told (step 2)."""
        row = int(np.searchsorted(self.devices, device))
        if row == len(self.devices) or self.devices[row] != device:
            raise KeyError(f"device {device} is not in the plan")
        return Assignment(self.quotas[row].astype(np.int64), self.label_weights, self.mass_per_slot)

    def snapshot(self) -> State:
        """The plan as plain arrays; what was lacking is not part of it, it is found anew by planning."""
        return {
            "devices": self.devices,
            "quotas": self.quotas,
            "label_weights": self.label_weights,
            "mass_per_slot": np.array(self.mass_per_slot),
        }

    @staticmethod
    def from_snapshot(state: State) -> "Plan":
        mass = float(state["mass_per_slot"])
        return Plan(state["devices"], state["quotas"], state["label_weights"], mass)

    @property
    def slots(self) -> IntArray:
        """||D_y||_1: how many slots each region has over the fleet, (Y,)."""
        slots: IntArray = self.quotas.sum(axis=0, dtype=np.int64)
        return slots

    @property
    def holders(self) -> IntArray:
        """How many devices hold each region, (Y,)."""
        holders: IntArray = np.count_nonzero(self.quotas, axis=0)
        return holders

    def rows_for(self, fleet: Fleet) -> AnyArray:
        """The quotas that the devices of `fleet` have now, zero for those that joined since."""
        if fleet.labels != self.quotas.shape[1] and len(self.devices):
            raise ValueError(f"the plan has {self.quotas.shape[1]} labels, the fleet {fleet.labels}")
        rows = np.zeros((len(fleet), fleet.labels), dtype=self.quotas.dtype)
        if not len(self.devices):
            return rows
        _, before, now = np.intersect1d(self.devices, fleet.devices, assume_unique=True, return_indices=True)
        rows[now] = self.quotas[before]
        return rows


def make_plan(
    fleet: Fleet,
    quotas: AnyArray,
    *,
    weights: FloatArray | None = None,
    shortfalls: tuple[Shortfall, ...] = (),
) -> Plan:
    """The plan of these quotas, with gamma of Eq. 11 unless other weights are given."""
    stored = quotas.sum(axis=0, dtype=np.int64)
    mass = fleet.label_mass
    if weights is None:
        weights = label_weights(mass, stored)
    slots = int(stored.sum())
    return Plan(fleet.devices, quotas, weights, float(mass.sum()) / slots if slots else 0.0, shortfalls)


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
