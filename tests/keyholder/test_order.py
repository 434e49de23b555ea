"""The comparisons of a plan, and tables that compare alike."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedkeep.core.coordination import Greedy
from fedkeep.core.errors import RefusedError
from fedkeep.core.fleet import Fleet
from fedkeep.keyholder.order import Comparisons, Grid, OrderedFleet

tables = hnp.arrays(np.int64, st.tuples(st.integers(1, 7), st.integers(1, 5)), elements=st.integers(0, 6))


def signs_of(values: np.ndarray) -> np.ndarray:
    comparisons = Comparisons(*values.shape)
    differences = sum(comparisons.contribution(row, values[row]) for row in range(len(values)))
    return np.sign(differences).astype(np.int64)


@settings(deadline=None)
@given(tables)
def test_a_table_made_from_signs_has_the_same_signs(values: np.ndarray) -> None:
    table = Comparisons(*values.shape).table(signs_of(values))
    np.testing.assert_array_equal(signs_of(table), signs_of(values))
    np.testing.assert_array_equal(table == 0, values == 0)


@settings(deadline=None, max_examples=50)
@given(tables, st.integers(1, 3), st.sampled_from([None, 1, 2]), st.sampled_from(["even", "frequent"]))
def test_such_a_table_gives_the_same_plan(
    values: np.ndarray, clients: int, labels: int | None, quantities: str
) -> None:
    greedy = Greedy(clients, labels, quantities=quantities, improve_up_to=0)
    capacities = np.arange(1, len(values) + 1)
    table = Comparisons(*values.shape).table(signs_of(values))
    plain = greedy.plan(Fleet.numbered(capacities, values.astype(float)))
    totals = values.sum(axis=0).astype(float)
    plan = greedy.plan(OrderedFleet(np.arange(len(values)), capacities, table.astype(float), totals))
    np.testing.assert_allclose(plan.label_weights, plain.label_weights)
    np.testing.assert_array_equal(plan.quotas, plain.quotas)


def test_comparisons_that_go_round_in_a_circle_are_refused() -> None:
    signs = signs_of(np.array([[1], [2], [3]]))
    assert signs.tolist() == [-1, -1, -1, 1, 1, 1]
    signs[:3] = [1, -1, 1]
    with pytest.raises(RefusedError, match="contradict"):
        Comparisons(3, 1).table(signs)


def test_velocities_below_zero_contradict_themselves() -> None:
    with pytest.raises(RefusedError, match="contradict"):
        Comparisons(1, 1).table(np.array([-1]))


@settings(deadline=None)
@given(st.integers(1, 3000), st.lists(st.floats(0, 1e6), min_size=2, max_size=2))
def test_levels_keep_the_order_and_tell_the_seen_from_the_unseen(levels: int, pair: list[float]) -> None:
    slow, fast = sorted(pair)
    grid = Grid(levels)
    lower, upper = grid.level_of(np.array([slow, fast])).tolist()
    assert lower <= upper <= levels
    assert (lower == 0) == (slow == 0)
    ratio = (grid.fastest / grid.slowest) ** (1 / max(grid.levels - 1, 1))
    if grid.slowest <= slow and fast <= grid.fastest and fast > slow * ratio * (1 + 1e-9):
        assert lower < upper


@pytest.mark.parametrize("velocity", [-1.0, np.nan, np.inf])
def test_velocities_that_are_none_stay_on_the_device(velocity: float) -> None:
    with pytest.raises(RefusedError, match="nothing was sent"):
        Grid(10).level_of(np.array([velocity]))


def test_grids_without_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="levels must"):
        Grid(0)
    with pytest.raises(ValueError, match="slowest must"):
        Grid(5, slowest=2.0, fastest=1.0)
