"""From profiles to a plan: which labels each device stores, how many samples of each, their weight.

Steps 1 and 2 of the paper's overview. `paper-greedy` is the paper's Algorithm 1 to the letter;
`greedy` is ours, which repairs and improves what Algorithm 1 leaves.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.planning.assignment import (
    QUANTITIES,
    LabelHolders,
    even,
    improve,
    largest_per_row,
)
from fedkeep.core.planning.plan import Plan, Shortfall, make_plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.registry import Registry, find
from fedkeep.core.types import AnyArray, BoolArray, IntArray


class Coordinator(Protocol):
    """Decides what every device stores.

    Dataclass fields become keys of `[coordinator]` in an experiment's TOML.
    """

    def plan(self, fleet: FleetProfiles) -> Plan:
        """Make a plan from nothing.

        Parameters
        ----------
        fleet : FleetProfiles
            B and V of the paper: capacities and velocities of all devices.

        Returns
        -------
        Plan
            D, gamma and what could not be given.
        """

    def replan(self, plan: Plan, fleet: FleetProfiles) -> Plan:
        """Make a plan for the fleet as it is now, after devices joined, left or drifted.

        Parameters
        ----------
        plan : Plan
            The plan in force.
        fleet : FleetProfiles
            The devices that are there now.

        Returns
        -------
        Plan
            The new plan.
        """


@dataclass(frozen=True)
class Uncoordinated:
    """No coordination: all that a device sees is one region, and every stored sample counts 1.

    The plan has a single column, to be used with a single region: one store, one slot count, one
    weight.

    Examples
    --------
    >>> Uncoordinated().plan(FleetProfiles.numbered([4, 2], [[3, 1], [0, 5]])).quotas.tolist()
    [[4], [2]]
    """

    def plan(self, fleet: FleetProfiles) -> Plan:
        """Give every device all its slots, whatever comes.

        Parameters
        ----------
        fleet : FleetProfiles
            The devices to plan for.

        Returns
        -------
        Plan
            One column of quotas: the capacities.
        """
        velocities = fleet.velocities.sum(axis=1, dtype=np.float64)[:, None]
        whole = FleetProfiles(fleet.devices, fleet.capacities, velocities)
        return replace(make_plan(whole, fleet.capacities[:, None]), label_weights=np.ones(1))

    def replan(self, plan: Plan, fleet: FleetProfiles) -> Plan:  # noqa: ARG002 - nothing of the old plan matters
        """Plan anew: the old plan does not matter.

        Parameters
        ----------
        plan : Plan
            Not used.
        fleet : FleetProfiles
            The devices to plan for.

        Returns
        -------
        Plan
            As `plan` makes it.
        """
        return self.plan(fleet)


@dataclass(frozen=True)
class LabelLimits:
    """The two limits of problem (9), shared by all coordinators that divide labels."""

    clients_per_label: int | None = 5
    """n_label: the fewest holders a label should have (9b); None asks all who see it."""
    labels_per_client: int | None = None
    """n_client: the most labels a device holds (9c); None: what it sees and has slots for."""

    def __post_init__(self) -> None:
        check_range(self, "clients_per_label", "labels_per_client", least=1)

    def of_devices(self, fleet: FleetProfiles) -> IntArray:
        """Count the labels that each device can hold.

        Parameters
        ----------
        fleet : FleetProfiles
            The devices to plan for.

        Returns
        -------
        ndarray of int, shape (C,)
            No more than n_client, than it sees, than it has slots.
        """
        most = fleet.labels if self.labels_per_client is None else self.labels_per_client
        return np.minimum(np.minimum(fleet.seen, most), fleet.capacities)

    def stages(self, fleet: FleetProfiles) -> list[IntArray]:
        """List how many holders to find for each label, stage by stage.

        Parameters
        ----------
        fleet : FleetProfiles
            The devices to plan for.

        Returns
        -------
        list of ndarray of int, shape (Y,)
            First what the fleet can give to all labels alike, then what is wanted: n_label, or
            all who see the label where they are fewer.
        """
        most, slots = self.clients_per_label, int(self.of_devices(fleet).sum())
        wanted = fleet.owners if most is None else np.minimum(fleet.owners, most)
        levels = range(2, int(wanted.max(initial=1)) + 1)
        fitting = bisect_right(levels, slots, key=lambda level: np.minimum(wanted, level).sum())
        modest = np.minimum(wanted, 1 + fitting)
        return [wanted] if np.array_equal(modest, wanted) else [modest, wanted]

    def settle(self, fleet: FleetProfiles, quotas: AnyArray) -> Plan:
        """Make the plan of these quotas, with what it lacks.

        Parameters
        ----------
        fleet : FleetProfiles
            The devices that were planned for.
        quotas : ndarray of int, shape (C, Y)
            D.

        Returns
        -------
        Plan
            With a shortfall for each label that lacks holders, and one for all devices that lack
            slots.
        """
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
class PaperGreedy(LabelLimits):
    """The paper's greedy to the letter: Algorithm 1, no repair, no search, gamma as printed.

    Labels come in the order of how few devices own them, of equals the lower number first. Each
    goes to the devices with the highest velocity of it that still may hold a label, of equals the
    lower number first, and to no more than `clients_per_label` of them. Slots are divided evenly,
    the remainder goes to the device's fastest labels.

    References
    ----------
    Gong et al., To Store or Not?, WWW 2023, section 3.3 and Eq. 11; the journal version, IEEE/ACM
    ToN 32(4), 2024, Algorithm 1, which has the stop at n_label. Its constraints ask for more:
    `unassigned` says what becomes of devices that it leaves with nothing (docs/deviations.md).

    Examples
    --------
    >>> V = [[400, 200, 300], [200, 300, 200], [300, 0, 400]]
    >>> plan = PaperGreedy(2, 2).plan(FleetProfiles.numbered([20, 40, 20], V))  # appendix A
    >>> plan.quotas.tolist()
    [[10, 10, 0], [0, 20, 20], [10, 0, 10]]
    >>> plan.label_weights.round(4).tolist()
    [1.5652, 0.5797, 1.0435]
    """

    unassigned: Literal["idle", "fill"] = "idle"
    """Room that is left when every label has its holders: `idle` is Algorithm 1, which stops there;
    `fill` gives each device its fastest labels up to its limit, as ||D_c|| = |B_c| in (9) asks."""

    def plan(self, fleet: FleetProfiles) -> Plan:
        """Make the plan of Algorithm 1.

        Parameters
        ----------
        fleet : FleetProfiles
            B and V of the paper.

        Returns
        -------
        Plan
            With gamma of Eq. 11 over all of the stream, also of labels that nobody holds.
        """
        holdings = LabelHolders(fleet.velocities, self.of_devices(fleet))
        most = fleet.owners if self.clients_per_label is None else self.clients_per_label
        holdings.grant(
            np.argsort(fleet.owners, kind="stable"), np.broadcast_to(most, fleet.owners.shape)
        )
        if self.unassigned == "fill":
            holdings.fill()
        plan = self.settle(fleet, even(fleet, holdings.held))
        stored = plan.slots
        # Eq. 11, as ||V_y|| / ||D_y|| over ||V|| / ||D||
        weights = np.divide(
            fleet.label_mass, stored * plan.mass_per_slot, out=np.zeros(fleet.labels),
            where=(stored > 0) & (plan.mass_per_slot > 0),
        )  # fmt: skip
        return replace(plan, label_weights=weights)

    def replan(self, plan: Plan, fleet: FleetProfiles) -> Plan:  # noqa: ARG002 - the paper plans once
        """Plan anew: Algorithm 1 knows no earlier plan.

        Parameters
        ----------
        plan : Plan
            Not used.
        fleet : FleetProfiles
            The devices that are there now.

        Returns
        -------
        Plan
            As `plan` makes it.
        """
        return self.plan(fleet)


@dataclass(frozen=True)
class Greedy(LabelLimits):
    """The paper's greedy with repair, stages and local search of ours.

    `paper-greedy` is the paper's.

    `clients_per_label` is a minimum, as in (9b): a last pass fills every device up to its limit, or
    most devices of a large fleet would store nothing. Where the fleet cannot give every label its
    minimum, all labels first get as many as it can give to each, so that none is left out for the
    sake of another's second holder.

    Examples
    --------
    >>> fleet = FleetProfiles.numbered(capacities=[4, 2], velocities=[[3, 1, 2], [0, 0, 5]])
    >>> plan = Greedy(clients_per_label=1, labels_per_client=2).plan(fleet)
    >>> plan.quotas.tolist()  # label 2 is left to device 1, which sees most of it
    [[2, 2, 0], [0, 0, 2]]
    >>> plan.label_weights.round(2).tolist()  # gamma: share of the stream over share of the slots
    [0.82, 0.27, 1.91]
    """

    quantities: str = "even"
    """How slots are divided among a device's labels: "even", or "frequent", all but one each for
    the most frequent."""

    improve_up_to: int = 1000
    """Fleets of up to so many devices are improved by local search; in larger ones the greedy
    choice is as good."""

    def plan(self, fleet: FleetProfiles) -> Plan:
        """Make a plan from nothing.

        Parameters
        ----------
        fleet : FleetProfiles
            The devices to plan for.

        Returns
        -------
        Plan
            Improved by local search in fleets of up to `improve_up_to` devices.
        """
        return self.settle(
            fleet, self._divide(fleet, None, improving=len(fleet) <= self.improve_up_to)
        )

    def replan(self, plan: Plan, fleet: FleetProfiles) -> Plan:
        """Keep every assignment that still can be kept.

        Parameters
        ----------
        plan : Plan
            The plan in force.
        fleet : FleetProfiles
            The devices that are there now.

        Returns
        -------
        Plan
            Only devices whose labels change have new quotas.
        """
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
    "coordinator",
    {"none": Uncoordinated, "greedy": Greedy, "paper-greedy": PaperGreedy},
    methods=("plan", "replan"),
)
