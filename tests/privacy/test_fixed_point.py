"""Sums of integers that stand for numbers: exact, bounded, and re-based."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import RejectedError
from fedkeep.privacy.secagg.fixed_point import WORD, Differences, FixedPoint


@settings(deadline=None)
@given(st.floats(1e-3, 1e6), st.integers(1, 500), st.integers(0, 2**32))
def test_a_sum_never_overflows_and_is_off_by_half_a_step_a_device(
    bound: float, summands: int, seed: int
) -> None:
    grid = FixedPoint(bound, summands)
    values = np.random.default_rng(seed).choice([-bound, bound, bound / 3], size=(summands, 4))
    values[:, 0] = bound
    total = np.zeros(4, WORD)
    for row in values:
        total = total + grid.encode(row)
    off = np.abs(grid.decode(total) - values.sum(axis=0)).max()
    assert off <= grid.step * summands + 1e-12 * bound * summands


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.01, -1e30])
def test_what_a_sum_would_hide_is_refused_before_it_is_masked(value: float) -> None:
    with pytest.raises(RejectedError, match="nothing was sent"):
        FixedPoint(1.0, 10).encode(np.array([0.0, value]))


class FleetProfiles:
    """Devices that send differences, some of whose reports get lost on the way."""

    def __init__(self, count: int, grid: FixedPoint) -> None:
        self.grid = grid
        self.devices = [Differences(2) for _ in range(count)]
        self.counted = [b""] * count
        self.latest: dict[int, np.ndarray] = {}
        self.total = np.zeros(2, WORD)

    def round(self, number: int, participants: dict[int, bool], values: np.ndarray) -> None:
        """Device d has nothing new to say where its first value is above 0.9."""
        session = f"session {number}".encode()
        for device, arrives in participants.items():
            news = self.grid.encode(values[device]) if values[device][0] <= 0.9 else None
            sent = self.devices[device].send(news, session, self.counted[device])
            if arrives:
                self.total = self.total + sent
                self.counted[device] = session
                if news is not None:
                    self.latest[device] = self.grid.decode(news)

    def values(self) -> np.ndarray:
        return self.grid.decode(self.total)

    def rebase(self) -> None:
        self.total = np.zeros(2, WORD)
        self.counted, self.latest = [b""] * len(self.devices), {}


@settings(deadline=None)
@given(
    st.lists(st.dictionaries(st.integers(0, 4), st.booleans()), max_size=12), st.integers(0, 2**32)
)
def test_differences_add_up_to_the_latest_of_every_device_whatever_gets_lost(
    rounds: list[dict[int, bool]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    fleet = FleetProfiles(5, FixedPoint(1.0, 5))
    for number, participants in enumerate(rounds):
        fleet.round(number, participants, rng.uniform(-1, 1, (5, 2)))
        restored = Differences(2)
        restored.restore(fleet.devices[0].snapshot())
        fleet.devices[0] = restored
    expected = sum(fleet.latest.values(), np.zeros(2))
    np.testing.assert_allclose(fleet.values(), expected, atol=1e-12)


def test_rebasing_drops_devices_that_left() -> None:
    fleet = FleetProfiles(3, FixedPoint(1.0, 3))
    values = np.array([[0.5, 0.5], [0.25, 0.25], [0.125, 0.125]])
    fleet.round(0, {0: True, 1: True, 2: True}, values)
    fleet.rebase()
    assert fleet.values().tolist() == [0.0, 0.0]
    fleet.round(1, {0: True, 1: False}, values)
    fleet.round(2, {0: True, 1: True}, values)
    np.testing.assert_array_equal(fleet.values(), [0.75, 0.75])


def test_a_device_that_lost_its_memory_does_not_count_twice() -> None:
    device = Differences(2)
    assert device.knows(b"")
    assert not device.knows(b"session 1")
    with pytest.raises(RejectedError, match="lost estimator"):
        device.send(np.ones(2, np.uint64), b"session 2", counted=b"session 1")
