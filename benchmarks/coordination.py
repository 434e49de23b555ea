"""How near greedy coordination comes to the optimum of problem (9), and its time on large fleets.

Fleets of 6-15 devices and 10 labels, both limits 2, as in the journal version. Every method first
minimises the holders missing from (9b): those that keep labels from having as many as the fleet can
give to all, then the rest. Every method drops (9d), since the label weights supply it; what it
would cost is a separate row.
"""

import argparse
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from fedkeep.core.planning.assignment import frequent, largest_per_row
from fedkeep.core.planning.greedy import Greedy, LabelLimits
from fedkeep.core.planning.plan import Plan, make_plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.solvers.exact import Exact, Problem

LABELS, LIMIT = 10, 2
UNDER_9D = "optimum under (9d), tenth"
"""Takes the solver seconds a fleet: measured on a tenth of them."""
KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "all labels": lambda rng, n: rng.random((n, LABELS)),
    "half the labels": lambda rng, n: rng.random((n, LABELS)) * (rng.random((n, LABELS)) < 0.5),
    "skewed": lambda rng, n: (
        rng.dirichlet(np.full(LABELS, 0.5), n) * rng.lognormal(0, 1, n)[:, None]
    ),
}
"""What devices see: random rates for all labels, for some, or few labels at uneven rates."""


@dataclass(frozen=True)
class Relaxed(LabelLimits):
    """The l1 relaxation: problem (9) with fractions of labels.

    Each device then holds its largest ones. For comparison only: rounding drops the minimum of
    holders that the fractions met.
    """

    def plan(self, fleet: FleetProfiles) -> Plan:
        problem = Problem(fleet, self)
        fractions = np.zeros(fleet.velocities.shape)
        fractions[problem.rows, problem.labels] = problem.solve(relaxed=True)[problem.held]
        held = largest_per_row(fractions, self.of_devices(fleet))
        return self.settle(fleet, frequent(fleet, held))

    def replan(self, plan: Plan, fleet: FleetProfiles) -> Plan:  # noqa: ARG002 - knows no history
        return self.plan(fleet)


def random_fleet(seed: int) -> FleetProfiles:
    """One of the fleets; the kinds take turns."""
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(6, 16))
    velocities = list(KINDS.values())[seed % len(KINDS)](rng, devices)
    return FleetProfiles.numbered(rng.integers(5, 51, devices), velocities)


def objective(plan: Plan, fleet: FleetProfiles) -> float:
    return float((plan.quotas * fleet.velocities).sum())


def lacking(plan: Plan) -> int:
    """The holders missing from (9b)."""
    return int(np.maximum(0, LIMIT - plan.holders).sum())


class EvenProblem(Problem):
    """Problem (9) when every label held gets an even share of the store, as in greedy's default."""

    def objective(self) -> np.ndarray:
        limits = LabelLimits(LIMIT, LIMIT).of_devices(self.fleet)
        share = self.fleet.capacities / np.maximum(limits, 1)
        cost = np.zeros(self.size)
        cost[self.held] = -(self.fleet.velocities * share[:, None])[self.rows, self.labels]
        return cost

    def best(self) -> float:
        return -float(self.objective() @ self.solve())


def random_labels(fleet: FleetProfiles) -> Plan:
    """Greedy with made-up rates: within the limits, yet blind."""
    rates = np.random.default_rng(0).random(fleet.velocities.shape) * (fleet.velocities > 0)
    blind = Greedy(LIMIT, LIMIT, improve_up_to=0).plan(
        FleetProfiles(fleet.devices, fleet.capacities, rates)
    )
    return make_plan(fleet, frequent(fleet, blind.quotas > 0))


def measure(fleet: FleetProfiles, *, with_9d: bool) -> dict[str, tuple[float, int]]:
    """Per row of the table: the objective over the optimum, and the holders missing beyond it."""
    exact = Exact(LIMIT, LIMIT).plan(fleet)
    best, fewest = objective(exact, fleet), lacking(exact)
    plans = {
        "greedy": Greedy(LIMIT, LIMIT, "frequent").plan(fleet),
        "greedy, no local search": Greedy(LIMIT, LIMIT, "frequent", improve_up_to=0).plan(fleet),
        "greedy, even slots": Greedy(LIMIT, LIMIT, "even").plan(fleet),
        "random labels": random_labels(fleet),
        "l1 relaxation, rounded": Relaxed(LIMIT, LIMIT).plan(fleet),
    }
    if with_9d:
        plans[UNDER_9D] = Exact(LIMIT, LIMIT, unbiased=True, seconds=600).plan(fleet)
    rows = {
        name: (objective(plan, fleet) / best, lacking(plan) - fewest)
        for name, plan in plans.items()
    }
    even = (
        objective(plans["greedy, even slots"], fleet)
        / EvenProblem(fleet, LabelLimits(LIMIT, LIMIT)).best()
    )
    rows["greedy, even slots / best even"] = (even, rows["greedy, even slots"][1])
    return rows


def plan_a_million(devices: int, labels: int) -> tuple[float, float, float]:
    """Seconds to plan a fleet whose devices see a fifth of the labels; CPU seconds; peak GB."""
    rng = np.random.default_rng(0)
    velocities = rng.random((devices, labels), dtype=np.float32)
    velocities[velocities < 0.8] = 0
    fleet = FleetProfiles.numbered(rng.integers(5, 51, devices), velocities)
    started, worked = perf_counter(), process_time()
    plan = Greedy(clients_per_label=devices // 1000, labels_per_client=5).plan(fleet)
    seconds, worked = perf_counter() - started, process_time() - worked
    assert not any(s.label is not None for s in plan.shortfalls)
    return seconds, worked, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="20 fleets, and a tenth of the devices"
    )
    options = parser.parse_args()
    seconds, worked, peak = plan_a_million(100_000 if options.quick else 1_000_000, 100)
    count = 20 if options.quick else 200
    measured = [measure(random_fleet(seed), with_9d=seed < count // 10) for seed in range(count)]
    print(f"{'over the optimum':<32}{'median':>8}{'worst':>8}{'holders missing beyond it':>28}")
    for name in measured[0]:
        ratios = [rows[name][0] for rows in measured if name in rows]
        missing = sum(rows[name][1] for rows in measured if name in rows)
        print(f"{name:<32}{np.median(ratios):>8.3f}{min(ratios):>8.3f}{missing:>28}")
    size = "100,000 devices" if options.quick else "a million devices"
    print(
        f"{f'{size}, 100 labels':<32}"
        f"{seconds:>7.1f}s{peak:>6.1f} GB   ({worked:.1f} s of processor time)"
    )
    greedy = [rows["greedy"][0] for rows in measured]
    if options.json:
        figures = {
            "ratio_median": float(np.median(greedy)),
            "ratio_worst": min(greedy),
            "plan_1m_seconds": seconds,
            "plan_1m_peak_gb": peak,
        }
        options.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
