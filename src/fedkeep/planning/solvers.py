"""Planning by a solver, HiGHS: problem (9) as a mixed-integer program, and quantities by Eq. 10 as a network flow."""

from importlib import import_module
from typing import Any

import numpy as np

from fedkeep.core.coordination import LabelLimits, coordinator
from fedkeep.core.errors import FedkeepError, needing
from fedkeep.core.fleet import Fleet
from fedkeep.core.plan import Plan, find_shortfalls, make_plan
from fedkeep.core.quantities import Held, apportion, quantities, quota_table
from fedkeep.core.types import AnyArray, FloatArray

_TOLERANCE = 0.01
"""How far a goal already met may slip while the next is sought, in holders or slots."""
_ROUNDING = 1.0
"""Slots by which a label may miss its share (9d) for nothing."""


def load(module: str, feature: str) -> Any:
    """A module of the `plan` extra, when first needed (scipy alone takes some 50 MB), or what to install for it."""
    with needing(feature, "plan"):
        return import_module(module)


@coordinator("exact")
class Exact(LabelLimits):
    """The optimum of problem (9): first the fewest missing holders (9b), then the largest objective (9a).

    With `unbiased`, the slots of each label follow its share of the stream (9d), to the slot or as nearly as can
    be, which comes between the two. Otherwise the label weights supply it.

    >>> fleet = Fleet.numbered(capacities=[4, 2], velocities=[[3, 1, 2], [0, 0, 5]])
    >>> Exact(clients_per_label=1, labels_per_client=2).plan(fleet).quotas.tolist()
    [[3, 1, 0], [0, 0, 2]]
    """

    unbiased: bool = False
    seconds: float = 60.0
    """The time the solver may take; without a proven optimum by then, planning fails."""

    def plan(self, fleet: Fleet) -> Plan:
        problem = Problem(fleet, self)
        quotas = problem.table(problem.solve(unbiased=self.unbiased, seconds=self.seconds)[problem.slots])
        shortfalls = find_shortfalls(fleet, quotas > 0, self.clients_per_label, self.labels_per_client)
        return make_plan(fleet, quotas, shortfalls=shortfalls)

    def replan(self, plan: Plan, fleet: Fleet) -> Plan:  # noqa: ARG002 - an optimum knows no history
        return self.plan(fleet)


class Problem:
    """The rows and columns of problem (9): per owned pair (c, y) its slots D and whether it is held, then slacks."""

    def __init__(self, fleet: Fleet, limits: LabelLimits) -> None:
        self._optimize = load("scipy.optimize", "the exact coordinator")
        self._sparse = load("scipy.sparse", "the exact coordinator")
        self.fleet = fleet
        self.rows, self.labels = np.nonzero(fleet.velocities)
        self.stages = limits.stages(fleet)
        self.slots: AnyArray = np.arange(len(self.rows))
        """The columns of D."""
        self.held: AnyArray = len(self.rows) + self.slots
        slacks = np.arange((len(self.stages) + 1) * fleet.labels).reshape(-1, fleet.labels)
        self.slack: AnyArray = 2 * len(self.rows) + slacks
        """A column a label: the holders missing at each stage and, last, the distance from (9d)."""
        self.size = 2 * len(self.rows) + slacks.size
        self.constraints: list[Any] = []
        self._of_devices(limits)
        self._of_labels()

    def objective(self) -> FloatArray:
        return self._cost(self.slots, -self.fleet.velocities[self.rows, self.labels])

    def _cost(self, columns: AnyArray, each: AnyArray | float) -> FloatArray:
        cost = np.zeros(self.size)
        cost[columns] = each
        return cost

    def _of_devices(self, limits: LabelLimits) -> None:
        """A held label has a slot, an unheld one none; devices use up their capacity within their limit (9c)."""
        pair, capacity = self.slots, self.fleet.capacities[self.rows]
        self._add(len(pair), [(pair, self.slots, 1), (pair, self.held, -1)], 0, np.inf)
        self._add(len(pair), [(pair, self.slots, 1), (pair, self.held, -capacity)], -np.inf, 0)
        full = np.where(self.fleet.seen > 0, self.fleet.capacities, 0)
        self._add(len(self.fleet), [(self.rows, self.slots, 1)], full, full)
        self._add(len(self.fleet), [(self.rows, self.held, 1)], 0, limits.of_devices(self.fleet))

    def _of_labels(self) -> None:
        """Holders enough (9b), and (9d) to the slot; what is beyond that is slack: whole slots seldom meet it."""
        *missing, distance = self.slack
        count, label, mass = self.fleet.labels, np.arange(self.fleet.labels), self.fleet.label_mass
        for slack, least in zip(missing, self.stages, strict=True):
            self._add(count, [(self.labels, self.held, 1), (label, slack, 1)], least, np.inf)
        target = mass / max(mass.sum(), 1e-300) * self.fleet.capacities.sum()
        self._add(count, [(self.labels, self.slots, 1), (label, distance, 1)], target - _ROUNDING, np.inf)
        self._add(count, [(self.labels, self.slots, 1), (label, distance, -1)], -np.inf, target + _ROUNDING)

    def _add(self, count: int, parts: list[tuple[AnyArray, AnyArray, Any]], low: Any, high: Any) -> None:
        """So many rows, of entries (row, column, value)."""
        row, column, value = map(np.concatenate, zip(*(np.broadcast_arrays(*part) for part in parts), strict=True))
        matrix = self._sparse.csr_array((value.astype(np.float64), (row, column)), shape=(count, self.size))
        self.constraints.append(self._optimize.LinearConstraint(matrix, low, high))

    def solve(self, *, unbiased: bool = False, relaxed: bool = False, seconds: float = 60.0) -> FloatArray:
        """All columns at the optimum: each goal is met in turn and then held to while the next one is sought."""
        goals = [self._cost(slack, 1.0) for slack in self.slack[: len(self.stages) + unbiased]]
        solution = np.zeros(self.size)
        constraints = list(self.constraints)
        for goal in [*goals, self.objective()]:
            solution = self._minimise(goal, constraints, relaxed=relaxed, seconds=seconds)
            reached = float(goal @ solution)
            constraints.append(self._optimize.LinearConstraint(goal[None, :], -np.inf, reached + _TOLERANCE))
        return solution

    def _minimise(self, cost: FloatArray, constraints: list[Any], *, relaxed: bool, seconds: float) -> FloatArray:
        found = self._optimize.milp(
            cost / max(np.abs(cost).max(initial=0.0), 1e-300),
            constraints=constraints,
            bounds=self._optimize.Bounds(0, np.where(np.isin(np.arange(self.size), self.held), 1, np.inf)),
            integrality=np.arange(self.size) < (0 if relaxed else 2 * len(self.rows)),
            options={"time_limit": seconds},
        )
        if found.status != 0:
            raise FedkeepError(f"no exact plan: {found.message} Use the greedy coordinator for this fleet.")
        solution: FloatArray = found.x
        return solution

    def table(self, values: FloatArray) -> AnyArray:
        """One value per owned pair, as a (C, Y) table of whole numbers."""
        table = np.zeros(self.fleet.velocities.shape, dtype=np.int64)
        table[self.rows, self.labels] = np.rint(values).astype(np.int64)
        return table


@quantities("lp")
def lp(fleet: Fleet, held: Held) -> AnyArray:
    """Slots closest to each label's share of the stream and, among those, the most for fast devices (Eq. 10).

    Shares are rounded to whole slots and may be missed at a price. What is left is a network flow, whose optimal
    corner is whole, so that nothing need be rounded afterwards.
    """
    quotas = quota_table(fleet)
    rows, labels = np.nonzero(held)
    if not len(rows):
        return quotas
    rates = fleet.velocities[rows, labels].astype(np.float64)
    miss = 2.0 * (fleet.labels + 1) * rates.max()
    found = load("scipy.optimize", "lp quantities").linprog(
        np.concatenate([-rates, np.full(2 * fleet.labels, miss)]) / miss,
        A_eq=_flows(held),
        b_eq=_supplies(fleet, held),
        method="highs-ds",
    )
    if found.status != 0:
        raise FedkeepError(f"no lp quantities: {found.message}")
    quotas[rows, labels] = 1 + np.rint(found.x[: len(rows)])
    return quotas


def _flows(held: Held) -> Any:
    """Rows: devices that hold something, then labels. Columns: pairs held, then slots over and under per label."""
    rows, labels = np.nonzero(held)
    busy, device = np.unique(rows, return_inverse=True)
    pair, label = np.arange(len(rows)), np.arange(held.shape[1])
    row = np.concatenate([device, len(busy) + labels, len(busy) + np.tile(label, 2)])
    column = np.concatenate([pair, pair, len(rows) + np.arange(2 * len(label))])
    entry = np.concatenate([np.ones(2 * len(pair)), -np.ones(len(label)), np.ones(len(label))])
    return load("scipy.sparse", "lp quantities").csr_array((entry, (row, column)))


def _supplies(fleet: Fleet, held: Held) -> FloatArray:
    """The slots left to each device and wanted for each label, once every pair held has its first one."""
    busy = held.any(axis=1)
    spare = fleet.capacities[busy] - held[busy].sum(axis=1)
    wanted = apportion(int(fleet.capacities[busy].sum()), fleet.label_mass) - held.sum(axis=0)
    return np.concatenate([spare, wanted]).astype(np.float64)
