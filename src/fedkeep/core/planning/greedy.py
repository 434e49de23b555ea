"""Profiles to a plan: which labels each device stores, how many samples of each, and what they count (steps 1, 2)."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.planning.assignment import QUANTITIES, LabelHolders, improve, largest_per_row
from fedkeep.core.planning.plan import Plan, Shortfall, make_plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.registry import Registry, find
from fedkeep.core.types import AnyArray, BoolArray, IntArray


class Coordinator(Protocol):
    """Decides what every device stores; dataclass fields become keys of `[coordinator]` in an experiment's TOML."""

    def plan(self, fleet: FleetProfiles) -> Plan:
        """A plan from nothing."""

    def replan(self, plan: Plan, fleet: FleetProfiles) -> Plan:
        """A plan for the fleet as it is now, after devices joined, left or drifted."""


@dataclass(frozen=True)
class Uncoordinated:
    """No division of labour: all that a device sees is one region, and every stored sample counts 1.

    The plan has a single column, to be used with a single region: one store, one slot count, one weight.

    >>> Uncoordinated().plan(FleetProfiles.numbered([4, 2], [[3, 1], [0, 5]])).quotas.tolist()
    [[4], [2]]
    """

    def plan(self, fleet: FleetProfiles) -> Plan:
        velocities = fleet.velocities.sum(axis=1, dtype=np.float64)[:, None]
        whole = FleetProfiles(fleet.devices, fleet.capacities, velocities)
        return replace(make_plan(whole, fleet.capacities[:, None]), label_weights=np.ones(1))

    def replan(self, plan: Plan, fleet: FleetProfiles) -> Plan:  # noqa: ARG002 - nothing of the old plan matters
        return self.plan(fleet)


@dataclass(frozen=True)
class LabelLimits:
    """The two limits of problem (9), shared by all coordinators that divide labels."""

    clients_per_label: int | None = 5
    """n_label: the fewest holders a label should have (9b); None asks all who see it."""
    labels_per_client: int | None = None
    """n_client: the most labels a device holds (9c); None is as many as it sees and has slots for."""

    def __post_init__(self) -> None:
        check_range(self, "clients_per_label", "labels_per_client", least=1)

    def of_devices(self, fleet: FleetProfiles) -> IntArray:
        """The labels each device can hold: no more than n_client, than it sees, than it has slots."""
        most = fleet.labels if self.labels_per_client is None else self.labels_per_client
        return np.minimum(np.minimum(fleet.seen, most), fleet.capacities)

    def stages(self, fleet: FleetProfiles) -> list[IntArray]:
        """The holders to find for each label: first what the fleet can give to all alike, then what is wanted.

        Wanted is n_label, or all who see the label where they are fewer.
        """
        most, slots = self.clients_per_label, int(self.of_devices(fleet).sum())
        wanted = fleet.owners if most is None else np.minimum(fleet.owners, most)
        levels = range(2, int(wanted.max(initial=1)) + 1)
        fitting = bisect_right(levels, slots, key=lambda level: np.minimum(wanted, level).sum())
        modest = np.minimum(wanted, 1 + fitting)
        return [wanted] if np.array_equal(modest, wanted) else [modest, wanted]

    def settle(self, fleet: FleetProfiles, quotas: AnyArray) -> Plan:
        """The plan of these quotas, and what lacks: holders of labels, then in one shortfall slots of devices."""
        short: list[Shortfall] = []
        holders: IntArray = np.count_nonzero(quotas, axis=0)
        for label, (owners, got) in enumerate(
            zip(fleet.owners.tolist(), holders.tolist(), strict=True)
        ):
            wanted = max(1, owners) if self.clients_per_label is None else self.clients_per_label
            reason = "the others that see it hold as many labels as they may"
            if owners == 0:
                reason = "no device sees it, so it has no weight until one does"
            elif got == owners:
                reason = f"no more than {owners} see it"
            elif got == 0:
                reason += ", so it has no weight"
            if got < wanted:
                short.append(Shortfall(label, wanted, got, reason))
        labels = (
            fleet.seen
            if self.labels_per_client is None
            else np.minimum(fleet.seen, self.labels_per_client)
        )
        crowded = np.flatnonzero(fleet.capacities < labels)
        if len(crowded):
            wanted, fitting = int(labels[crowded].sum()), int(fleet.capacities[crowded].sum())
            devices = tuple(fleet.devices[crowded].tolist())
            short.append(Shortfall(None, wanted, fitting, "every label held needs a slot", devices))
        return make_plan(fleet, quotas, tuple(short))


@dataclass(frozen=True)
class Greedy(LabelLimits):
    """The paper's greedy: scarce labels first, each to the devices that see most of it.

    `clients_per_label` is a minimum, as in (9b): a last pass fills every device up to its limit, or most devices
    of a large fleet would store nothing. Where the fleet cannot give every label its minimum, all labels first get
    as many as it can give to each, so that none is left out for the sake of another's second holder.

    >>> fleet = FleetProfiles.numbered(capacities=[4, 2], velocities=[[3, 1, 2], [0, 0, 5]])
    >>> plan = Greedy(clients_per_label=1, labels_per_client=2).plan(fleet)
    >>> plan.quotas.tolist()  # label 2 is left to device 1, which sees most of it
    [[2, 2, 0], [0, 0, 2]]
    >>> plan.label_weights.round(2).tolist()  # gamma: share of the stream over share of the slots
    [0.82, 0.27, 1.91]
    """

    quantities: str = "even"
    """How slots are divided among a device's labels: "even", or "frequent", all but one each for the most frequent."""

    improve_up_to: int = 1000
    """Fleets of up to so many devices are improved by local search; in larger ones the greedy choice is as good."""

    def plan(self, fleet: FleetProfiles) -> Plan:
        return self.settle(
            fleet, self._divide(fleet, None, improving=len(fleet) <= self.improve_up_to)
        )

    def replan(self, plan: Plan, fleet: FleetProfiles) -> Plan:
        """Keeps every assignment that still can be kept; only devices whose labels change get new quotas."""
        old, limits = plan.rows_for(fleet), self.of_devices(fleet)
        held = (old > 0) & (fleet.velocities > 0)
        over = np.flatnonzero(held.sum(axis=1) > limits)
        held[over] = largest_per_row(np.where(held[over], fleet.velocities[over], 0), limits[over])
        quotas = self._divide(fleet, held, improving=False)
        unchanged = ((quotas > 0) == (old > 0)).all(axis=1) & (old.sum(axis=1) == fleet.capacities)
        return self.settle(fleet, np.where(unchanged[:, None], old, quotas).astype(quotas.dtype))

    def _divide(self, fleet: FleetProfiles, held: BoolArray | None, *, improving: bool) -> AnyArray:
        """The quotas of who holds what: on top of what is held, in the greedy's order."""
        holdings = LabelHolders(fleet.velocities, self.of_devices(fleet), held)
        order = np.lexsort((-fleet.label_mass, fleet.owners))
        stages = self.stages(fleet)
        for least in stages:
            holdings.grant(order, least)
            holdings.repair(least)
        holdings.fill()
        for least in stages:
            holdings.repair(least)
        if improving:
            improve(holdings, fleet.capacities, stages, concentrated=self.quantities == "frequent")
        return find(self.quantities, QUANTITIES, "rule for coordinator.quantities")(
            fleet, holdings.held
        )


COORDINATORS: Registry[type[Coordinator]] = Registry(
    "coordinator", {"none": Uncoordinated, "greedy": Greedy}, methods=("plan", "replan")
)
