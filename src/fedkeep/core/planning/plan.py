"""The plan: quotas D for every device, what a stored sample counts, and what could not be given."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.types import AnyArray, Assignment, DeviceId, FloatArray, IntArray, State
from fedkeep.core.weighting import label_weights


@dataclass(frozen=True)
class Shortfall:
    """A label with fewer holders than wanted, or devices with fewer slots than labels.

    In the second case `label` is None.
    """

    label: int | None
    wanted: int
    got: int
    reason: str
    devices: tuple[DeviceId, ...] = ()
    """The devices that lack slots."""

    def tell(
        self, labels: Sequence[str] | None = None, devices: Sequence[str] | None = None
    ) -> str:
        """The shortfall in a sentence, with names for labels and devices where there are any."""
        if self.label is not None:
            name = labels[self.label] if labels else self.label
            return f"label {name} has {self.got} of {self.wanted} holders: {self.reason}"
        named = [devices[device] if devices else str(device) for device in self.devices[:3]]
        more = [f"{len(self.devices) - 3} more"] if len(self.devices) > 3 else []
        where = ", ".join(named + more)
        return f"{self.got} of {self.wanted} labels fit on device {where}: {self.reason}"

    __str__ = tell


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
        """Give the plan as plain arrays.

        What was lacking is not part of it: it is found anew by planning.
        """
        names = ("devices", "quotas", "label_weights", "mass_per_slot")
        return {name: np.asarray(getattr(self, name)) for name in names}

    @staticmethod
    def from_snapshot(state: State) -> "Plan":
        mass = float(state["mass_per_slot"])
        return Plan(state["devices"], state["quotas"], state["label_weights"], mass)

    @property
    def slots(self) -> IntArray:
        """||D_y||_1: how many slots each region has over the fleet, (Y,)."""
        return np.asarray(self.quotas.sum(axis=0, dtype=np.int64))

    @property
    def holders(self) -> IntArray:
        """How many devices hold each region, (Y,)."""
        return np.asarray(np.count_nonzero(self.quotas, axis=0))

    def rows_for(self, fleet: FleetProfiles) -> AnyArray:
        """The quotas that the devices of `fleet` have now, zero for those that joined since."""
        rows = np.zeros((len(fleet), fleet.labels), dtype=self.quotas.dtype)
        if not len(self.devices):
            return rows
        if fleet.labels != self.quotas.shape[1]:
            raise ValueError(
                f"the plan has {self.quotas.shape[1]} labels, the fleet {fleet.labels}"
            )
        _, before, now = np.intersect1d(
            self.devices, fleet.devices, assume_unique=True, return_indices=True
        )
        rows[now] = self.quotas[before]
        return rows


def make_plan(
    fleet: FleetProfiles, quotas: AnyArray, shortfalls: tuple[Shortfall, ...] = ()
) -> Plan:
    """The plan of these quotas, with gamma of Eq. 11."""
    stored, mass = quotas.sum(axis=0, dtype=np.int64), fleet.label_mass
    slots, weights = int(stored.sum()), label_weights(mass, stored)
    return Plan(
        fleet.devices, quotas, weights, float(mass.sum()) / slots if slots else 0.0, shortfalls
    )
