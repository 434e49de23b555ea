"""The exact coordinator against brute force, and greedy against it."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.coordination import Relaxed
from fedkeep.core.errors import FedkeepError
from fedkeep.core.planning.assignment import frequent
from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.planning.profiles import FleetProfiles

pytest.importorskip("scipy")
from fedkeep.solvers.exact import Exact, quantities


def random_fleet(seed: int, devices: int, labels: int) -> FleetProfiles:
    rng = np.random.default_rng(seed)
    seen = rng.random((devices, labels)) < 0.7
    return FleetProfiles.numbered(
        rng.integers(2, 9, devices), rng.integers(1, 50, (devices, labels)) * seen
    )


def best_by_brute_force(fleet: FleetProfiles, fewest: int, most: int) -> tuple[int, float]:
    """The fewest missing holders, then the largest objective, over all choices of labels."""
    choices = []
    for c in range(len(fleet)):
        seen = np.flatnonzero(fleet.velocities[c])
        sizes = range(1, min(most, len(seen), int(fleet.capacities[c])) + 1)
        choices.append([labels for size in sizes for labels in combinations(seen, size)] or [()])
    best = (10**9, 0.0)
    for chosen in product(*choices):
        held = np.zeros(fleet.velocities.shape, dtype=bool)
        for c, labels in enumerate(chosen):
            held[c, list(labels)] = True
        missing = int(np.maximum(0, np.minimum(fleet.owners, fewest) - held.sum(axis=0)).sum())
        value = float((frequent(fleet, held) * fleet.velocities).sum())
        best = min(best, (missing, -value))
    return best[0], -best[1]


@pytest.mark.parametrize("seed", range(6))
def test_the_solver_finds_what_brute_force_finds(seed: int) -> None:
    fleet = random_fleet(seed, devices=4, labels=3)
    plan = Exact(1, 2).plan(fleet)
    missing = int(np.maximum(0, np.minimum(fleet.owners, 1) - plan.holders).sum())
    value = float((plan.quotas * fleet.velocities).sum())
    fewest, best = best_by_brute_force(fleet, 1, 2)
    assert missing == fewest
    assert value == pytest.approx(best)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_greedy_never_beats_the_optimum_nor_lacks_more_holders(seed: int) -> None:
    fleet = random_fleet(seed, devices=6, labels=4)
    exact, greedy = Exact(2, 2).plan(fleet), Greedy(2, 2, "frequent").plan(fleet)
    assert np.minimum(greedy.holders, 2).sum() == np.minimum(exact.holders, 2).sum()
    assert (greedy.quotas * fleet.velocities).sum() <= (
        exact.quotas * fleet.velocities
    ).sum() + 1e-6
    assert np.array_equal(exact.quotas.sum(axis=1), np.where(fleet.seen > 0, fleet.capacities, 0))
    assert ((exact.quotas > 0).sum(axis=1) <= 2).all()


def test_the_relaxation_is_rounded_to_a_plan_within_the_limits() -> None:
    fleet = random_fleet(3, devices=6, labels=4)
    plan = Relaxed(2, 2).plan(fleet)
    assert np.array_equal(plan.quotas.sum(axis=1), np.where(fleet.seen > 0, fleet.capacities, 0))
    assert ((plan.quotas > 0).sum(axis=1) <= 2).all()
    assert np.array_equal(Relaxed(2, 2).replan(plan, fleet).quotas, plan.quotas)


def test_unbiased_slots_follow_the_stream() -> None:
    fleet = FleetProfiles.numbered([10, 10], [[30, 10], [30, 10]])
    assert Exact(1, 2).plan(fleet).quotas.sum(axis=0).tolist() == [19, 1]
    unbiased = Exact(1, 2, unbiased=True).plan(fleet)
    assert unbiased.quotas.sum(axis=0).tolist() == [16, 4], "15 and 5, to the slot"
    assert unbiased.shortfalls == ()
    assert Exact(1, 2).replan(unbiased, fleet).quotas.sum(axis=0).tolist() == [19, 1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_best_quantities_use_up_every_store_and_come_nearer_the_stream_than_even_ones(
    seed: int,
) -> None:
    fleet = random_fleet(seed, devices=7, labels=4)
    even = Greedy(2, 2).plan(fleet).quotas
    best = quantities(fleet, even > 0)
    assert np.array_equal(even > 0, best > 0)
    assert np.array_equal(even.sum(axis=1), best.sum(axis=1))
    target = fleet.label_mass / fleet.label_mass.sum() * fleet.capacities.sum()
    even_miss, best_miss = (
        np.maximum(np.abs(each.sum(axis=0) - target) - 1, 0).sum() for each in (even, best)
    )
    assert best_miss <= even_miss + 0.01


def test_best_quantities_on_hand_numbers() -> None:
    """Two devices, two labels, 3 : 1 in the stream, to the slot.

    Device 0 sees more of label 0 and takes it.
    """
    fleet = FleetProfiles.numbered([10, 10], [[40, 5], [20, 15]])
    assert quantities(fleet, np.ones((2, 2), dtype=bool)).tolist() == [[9, 1], [7, 3]]


def test_a_silent_fleet_stores_nothing() -> None:
    fleet = FleetProfiles.numbered([3], [[0.0, 0.0]])
    assert Exact(1, 1).plan(fleet).quotas.tolist() == [[0, 0]]


def test_an_optimum_out_of_reach_is_reported_and_points_to_greedy() -> None:
    fleet = random_fleet(0, devices=40, labels=10)
    with pytest.raises(FedkeepError, match="Use the greedy coordinator"):
        Exact(3, 3, unbiased=True, seconds=1e-6).plan(fleet)
