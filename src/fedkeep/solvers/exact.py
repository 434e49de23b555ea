"""Problem (9) as a mixed-integer program, solved by HiGHS: `coordinator.name = "exact"`."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedkeep.core.errors import FedkeepError, optional_import
from fedkeep.core.planning.greedy import LabelLimits
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.types import AnyArray, BoolArray, FloatArray

_TOLERANCE = 0.01
"""How far a goal already met may slip while the next is sought, in holders or slots."""
_ROUNDING = 1.0
"""Slots by which a label may miss its share (9d) for nothing."""


def _solver() -> Any:
    """Import what is used of scipy."""
    with optional_import('coordinator "exact"', "plan"):
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    return SimpleNamespace(
        Bounds=Bounds, LinearConstraint=LinearConstraint, milp=milp, csr_array=csr_array
    )


@dataclass(frozen=True)
class Exact(LabelLimits):
    """The optimum of problem (9): the fewest missing holders (9b), then the largest objective (9a).

    With `unbiased`, the slots of each label follow its share of the stream (9d), to the slot or as
    nearly as can be, which comes between the two. Otherwise the label weights supply it. Fleets of
    500 devices and ten labels take about a second, of 2,000 about eight.

    References
    ----------
    Gong et al., To Store or Not?, WWW 2023, Eq. 9; HiGHS by `scipy.optimize.milp`.

    Examples
    --------
    >>> fleet = FleetProfiles.numbered(capacities=[4, 2], velocities=[[3, 1, 2], [0, 0, 5]])
    >>> Exact(clients_per_label=1, labels_per_client=2).plan(fleet).quotas.tolist()
    [[3, 1, 0], [0, 0, 2]]
    """

    unbiased: bool = False
    """Whether whole slots follow each label's share of the stream, as (9d) is printed."""
    seconds: float = 60.0
    """The time the solver may take; without a proven optimum by then, planning fails."""

    def plan(self, fleet: FleetProfiles) -> Plan:
        """Solve problem (9).

        Parameters
        ----------
        fleet : FleetProfiles
            B and V of the paper.

        Returns
        -------
        Plan
            The optimal D.

        Raises
        ------
        FedkeepError
            If the solver has no proven optimum in time.
        MissingExtraError
            If scipy is not installed.
        """
        table = Problem(fleet, self).table(unbiased=self.unbiased, seconds=self.seconds)
        return self.settle(fleet, table)

    def replan(self, plan: Plan, fleet: FleetProfiles) -> Plan:  # noqa: ARG002 - an optimum knows no history
        """Solve anew: an optimum knows no history.

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


def quantities(fleet: FleetProfiles, held: BoolArray) -> AnyArray:
    """Solve Eq. 10: the best slots once it is settled who holds what.

    Parameters
    ----------
    fleet : FleetProfiles
        B and V of the paper.
    held : ndarray of bool, shape (C, Y)
        S: which device holds which label.

    Returns
    -------
    ndarray of int, shape (C, Y)
        D, each label as near its share of the stream as can be.

    Examples
    --------
    >>> fleet = FleetProfiles.numbered([10, 10], [[40, 5], [20, 15]])
    >>> quantities(fleet, np.ones((2, 2), dtype=bool)).tolist()
    [[9, 1], [7, 3]]
    """
    return Problem(fleet, LabelLimits(None, None), held).table(unbiased=True)


class Problem:
    """The rows and columns of problem (9), per owned pair (c, y): slots, whether held, slacks.

    Where S is settled already, the pairs are those that are `held`, and all of them stay so. A held
    label has a slot, an unheld one none; devices use up their capacity within their limit (9c).
    Holders enough (9b), and (9d) to the slot; what is beyond that is slack: whole slots seldom
    meet it.

    Parameters
    ----------
    fleet : FleetProfiles
        B and V of the paper.
    limits : LabelLimits
        n_label and n_client.
    held : ndarray of bool, shape (C, Y), optional
        S, where it is settled already.
    """

    def __init__(
        self, fleet: FleetProfiles, limits: LabelLimits, held: BoolArray | None = None
    ) -> None:
        self._scipy = _solver()
        self.fleet = fleet
        self.rows, self.labels = np.nonzero(fleet.velocities if held is None else held)
        self.stages = limits.stages(fleet)
        pairs = len(self.rows)
        self.slots: AnyArray = np.arange(pairs)
        self.held: AnyArray = pairs + self.slots
        slacks = (len(self.stages) + 1) * fleet.labels
        self.slack: AnyArray = 2 * pairs + np.arange(slacks).reshape(-1, fleet.labels)
        """A column a label: holders missing at each stage and, last, the distance from (9d)."""
        self.size = 2 * pairs + self.slack.size
        of_held = np.isin(np.arange(self.size), self.held)
        self.bounds = self._scipy.Bounds(of_held * (held is not None), np.where(of_held, 1, np.inf))
        self.constraints: list[Any] = []
        pair, capacity = self.slots, fleet.capacities[self.rows]
        self._add(pairs, [(pair, self.slots, 1), (pair, self.held, -1)], 0, np.inf)
        self._add(pairs, [(pair, self.slots, 1), (pair, self.held, -capacity)], -np.inf, 0)
        full = np.where(np.isin(np.arange(len(fleet)), self.rows), fleet.capacities, 0)
        self._add(len(fleet), [(self.rows, self.slots, 1)], full, full)
        self._add(len(fleet), [(self.rows, self.held, 1)], 0, limits.of_devices(fleet))
        *missing, distance = self.slack
        count, label, mass = fleet.labels, np.arange(fleet.labels), fleet.label_mass
        for slack, least in zip(missing, self.stages, strict=True):
            self._add(count, [(self.labels, self.held, 1), (label, slack, 1)], least, np.inf)
        target = mass / max(mass.sum(), 1e-300) * fleet.capacities.sum()
        above = [(self.labels, self.slots, 1), (label, distance, 1)]
        below = [(self.labels, self.slots, 1), (label, distance, -1)]
        self._add(count, above, target - _ROUNDING, np.inf)
        self._add(count, below, -np.inf, target + _ROUNDING)

    def objective(self) -> FloatArray:
        """Give the cost of each column: minus (9a).

        Returns
        -------
        ndarray of float, shape (size,)
            Minus the velocity for a slot, 0 elsewhere.
        """
        cost = np.zeros(self.size)
        cost[self.slots] = -self.fleet.velocities[self.rows, self.labels]
        return cost

    def _add(
        self, count: int, parts: list[tuple[AnyArray, AnyArray, Any]], low: Any, high: Any
    ) -> None:
        """So many rows, of entries (row, column, value)."""
        row, column, value = map(
            np.concatenate, zip(*(np.broadcast_arrays(*part) for part in parts), strict=True)
        )
        entries = (value.astype(np.float64), (row, column))
        matrix = self._scipy.csr_array(entries, shape=(count, self.size))
        self.constraints.append(self._scipy.LinearConstraint(matrix, low, high))

    def solve(
        self, *, unbiased: bool = False, relaxed: bool = False, seconds: float = 60.0
    ) -> FloatArray:
        """Find all columns at the optimum, goal after goal.

        Each goal is met in turn and then held to while the next one is sought.

        Parameters
        ----------
        unbiased : bool
            Whether (9d) is a goal.
        relaxed : bool
            Whether fractions are allowed.
        seconds : float
            The time for each goal.

        Returns
        -------
        ndarray of float, shape (size,)
            The solution.

        Raises
        ------
        FedkeepError
            If the solver has no proven optimum in time.
        """
        columns = np.arange(self.size)
        goals = [
            np.isin(columns, slack) * 1.0 for slack in self.slack[: len(self.stages) + unbiased]
        ]
        constraints, solution = list(self.constraints), np.zeros(self.size)
        for goal in [*goals, self.objective()]:
            found = self._scipy.milp(
                goal / max(np.abs(goal).max(initial=0.0), 1e-300),
                constraints=constraints,
                bounds=self.bounds,
                integrality=columns < (0 if relaxed else 2 * len(self.rows)),
                options={"time_limit": seconds},
            )
            if found.status != 0:
                raise FedkeepError(
                    f"no exact plan: {found.message} Use the greedy coordinator for this fleet."
                )
            solution = found.x
            reached = float(goal @ solution) + _TOLERANCE
            constraints.append(self._scipy.LinearConstraint(goal[None, :], -np.inf, reached))
        return solution

    def table(self, *, unbiased: bool, seconds: float = 60.0) -> AnyArray:
        """Give the slots at the optimum.

        Parameters
        ----------
        unbiased : bool
            Whether (9d) is a goal.
        seconds : float
            The time for each goal.

        Returns
        -------
        ndarray of int, shape (C, Y)
            D.
        """
        table = np.zeros(self.fleet.velocities.shape, dtype=np.int64)
        solution = self.solve(unbiased=unbiased, seconds=seconds)
        table[self.rows, self.labels] = np.rint(solution[self.slots])
        return table
