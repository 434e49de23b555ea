"""Sums of integers that stand for numbers: exact, bounded, and re-based."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import RefusedError
from fedkeep.privacy.fixed_point import Differences, FixedPoint, RunningSum, weighted, weighted_mean


@settings(deadline=None)
@given(st.floats(1e-3, 1e6), st.integers(1, 500), st.sampled_from([32, 64]), st.integers(0, 2**32))
def test_a_sum_never_overflows_and_is_off_by_half_a_step_a_device(
    bound: float, summands: int, bits: int, seed: int
) -> None:
    grid = FixedPoint(bound, summands, bits)  # type: ignore[arg-type]
    values = np.random.default_rng(seed).choice([-bound, bound, bound / 3], size=(summands, 4))
    values[:, 0] = bound
    total = np.zeros(4, grid.dtype)
    for row in values:
        total = total + grid.encode(row)
    off = np.abs(grid.decode(total) - values.sum(axis=0)).max()
    assert off <= grid.step * summands + 1e-12 * bound * summands


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.01, -1e30])
def test_what_a_sum_would_hide_is_refused_before_it_is_masked(value: float) -> None:
    with pytest.raises(RefusedError, match="nothing was sent"):
        FixedPoint(1.0, 10).encode(np.array([0.0, value]))


def test_grids_that_are_no_grids_are_refused() -> None:
    for bound, summands in ((0.0, 1), (np.nan, 1), (1.0, 0), (1.0, 2**24)):
        with pytest.raises(ValueError, match="must"):
            FixedPoint(bound, summands)


def test_weighted_sums_tell_the_mean_and_nothing_without_weight() -> None:
    total = weighted(np.array([1.0, 2.0]), 3.0) + weighted(np.array([5.0, 6.0]), 1.0)
    mean = weighted_mean(total)
    assert mean is not None
    np.testing.assert_allclose(mean, [2.0, 3.0])
    assert weighted_mean(np.zeros(3)) is None


class Fleet:
    """Devices that send differences, some of whose reports get lost on the way."""

    def __init__(self, count: int, grid: FixedPoint) -> None:
        self.grid = grid
        self.devices = [Differences(2, grid.dtype) for _ in range(count)]
        self.counted = [b""] * count
        self.latest: dict[int, np.ndarray] = {}
        self.server = RunningSum(2, grid)

    def round(self, number: int, participants: dict[int, bool], values: np.ndarray) -> None:
        """Device d has nothing new to say where its first value is above 0.9."""
        session = f"session {number}".encode()
        for device, arrives in participants.items():
            news = self.grid.encode(values[device]) if values[device][0] <= 0.9 else None
            sent = self.devices[device].send(news, session, self.counted[device])
            if arrives:
                self.server = self.server.with_added(sent)
                self.counted[device] = session
                if news is not None:
                    self.latest[device] = self.grid.decode(news)

    def rebase(self) -> None:
        self.server = RunningSum(2, self.grid)
        self.counted, self.latest = [b""] * len(self.devices), {}


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 4), st.booleans()), max_size=12), st.integers(0, 2**32))
def test_differences_add_up_to_the_latest_of_every_device_whatever_gets_lost(
    rounds: list[dict[int, bool]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    fleet = Fleet(5, FixedPoint(1.0, 5))
    for number, participants in enumerate(rounds):
        fleet.round(number, participants, rng.uniform(-1, 1, (5, 2)))
        restored = Differences(2, fleet.grid.dtype)
        restored.restore(fleet.devices[0].snapshot())
        fleet.devices[0] = restored
    expected = sum(fleet.latest.values(), np.zeros(2))
    np.testing.assert_array_equal(fleet.server.values(), expected)


def test_rebasing_forgets_those_who_left() -> None:
    fleet = Fleet(3, FixedPoint(1.0, 3))
    values = np.array([[0.5, 0.5], [0.25, 0.25], [0.125, 0.125]])
    fleet.round(0, {0: True, 1: True, 2: True}, values)
    fleet.rebase()
    assert fleet.server.values().tolist() == [0.0, 0.0]
    fleet.round(1, {0: True, 1: False}, values)
    fleet.round(2, {0: True, 1: True}, values)
    np.testing.assert_array_equal(fleet.server.values(), [0.75, 0.75])


def test_a_device_that_lost_its_memory_does_not_count_twice() -> None:
    device = Differences(2, np.dtype(np.uint64))
    assert device.knows(b"")
    assert not device.knows(b"session 1")
    with pytest.raises(RefusedError, match="lost estimator"):
        device.send(np.ones(2, np.uint64), b"session 2", counted=b"session 1")


def test_a_running_sum_survives_a_restart_and_refuses_other_shapes() -> None:
    grid = FixedPoint(1.0, 3)
    first, second = RunningSum(2, grid).with_added(grid.encode(np.array([0.5, -0.5]))), RunningSum(2, grid)
    second.restore(first.snapshot())
    np.testing.assert_array_equal(second.values(), [0.5, -0.5])
    for bad in (np.zeros(1, np.uint32), np.zeros(2, np.uint64)):
        with pytest.raises(RefusedError, match="wrong form"):
            second.with_added(bad)
