"""Changes of a stream are found, and runs that a stream always has are none."""

import numpy as np
import pytest

from fedkeep.core.drift import AdaptiveWindow, PageHinkley, RunNoise
from fedkeep.core.types import IntArray


def changes(y: IntArray, labels: int, batch: int = 64) -> list[int]:
    """Where changes of label shares are found."""
    window = AdaptiveWindow(labels)
    shares = np.eye(labels)[y]
    places = range(0, len(y), batch)
    return [i for i in places if window.add(shares[i : i + batch]) is not None]


def test_a_steady_stream_does_not_change() -> None:
    found = [
        changes(np.random.default_rng(seed).integers(0, 4, 10_000), 4, batch=50)
        for seed in range(20)
    ]
    assert sum(map(len, found)) == 0


@pytest.mark.parametrize(("shift", "within"), [(0.1, 900), (0.2, 400), (0.6, 128)])
def test_a_change_is_found_soon_and_once(shift: float, within: int) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        share = np.where(np.arange(8000) < 4000, 0.1, 0.1 + shift)
        found = changes((rng.random(8000) < share).astype(np.int64), 2)
        assert found, seed
        assert 4000 - 64 < found[0] <= 4000 + within
        assert len(found) <= 3  # the window's new part may still hold some of the old


def test_how_values_are_cut_does_not_matter_to_the_window() -> None:
    values = np.random.default_rng(0).random((500, 3))
    whole, parts = AdaptiveWindow(3), AdaptiveWindow(3)
    whole.add(values)
    for value in values:
        parts.add(value[None])
    assert len(whole) == len(parts) == 496
    np.testing.assert_allclose(whole.mean, values[:496].mean(axis=0))
    np.testing.assert_allclose(parts.mean, whole.mean)


def test_runs_are_no_change_once_they_are_known() -> None:
    rng = np.random.default_rng(1)
    y = np.repeat(rng.integers(0, 3, 400), 50)
    found = changes(y, 3)
    assert len([place for place in found if place > 4000]) <= 1
    window = AdaptiveWindow(3)
    window._noise.add = lambda mean: None  # type: ignore[method-assign]
    blind = [window.add(np.eye(3)[y[i : i + 64]]) for i in range(0, len(y), 64)]
    assert sum(change is not None for change in blind) > 20


def test_the_window_is_bounded() -> None:
    window = AdaptiveWindow(1, block=1)
    for _ in range(200):
        window.add(np.zeros((1000, 1)))
    assert sum(map(len, window._levels)) <= 6 * 14
    assert len(window) <= 200_000
    assert window.mean.tolist() == [0.0]
    window.reset()
    assert len(window) == 0
    assert np.isnan(window.mean).all()


def test_the_oldest_values_are_forgotten_at_a_change() -> None:
    window = AdaptiveWindow(1)
    change = window.add(np.repeat([0.0, 1.0], 320)[:, None])
    assert change is not None
    assert (change.before, change.after, change.arrivals) == (0.0, 1.0, 320)
    assert len(window) == 320
    assert window.mean.tolist() == [1.0]


def test_the_noise_of_single_blocks_by_hand() -> None:
    noise = RunNoise(1, block=4)
    for value in [0.0, 1.0] * 6:
        noise.add(np.array([value]))
    # Eleven differences of 1, half their square, times the block; stretches of two are all alike.
    assert noise.variance().tolist() == [2.0]


def test_a_fall_is_told_and_a_rise_is_not() -> None:
    fall, rise = (PageHinkley(0.05, 0.5, 5) for _ in range(2))
    told = [fall.add(value) for value in [0.7] * 20 + [0.2] * 3]
    assert told.count(True) == 1
    assert not any(rise.add(value) for value in [0.2] * 20 + [0.9] * 20)
    early = PageHinkley(0.05, 0.5, 5)
    assert not any(early.add(value) for value in (1.0, 0.0, 0.0, 0.0))
