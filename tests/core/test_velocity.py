"""The velocity meter: right rates, bounded memory, independent of chunks and of clock jumps."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.velocity import VelocityMeter


def test_rates_are_arrivals_per_unit_of_time() -> None:
    meter = VelocityMeter(2, length=10, buckets=10)
    for time in range(4):
        meter.observe(np.array([0, 0, 1]), float(time))
    assert meter.velocity().tolist() == [2.0, 1.0]


def test_arrivals_before_the_window_do_not_count() -> None:
    meter = VelocityMeter(2, length=10, buckets=5)
    meter.observe(np.zeros(100, dtype=np.int64), 0.0)
    meter.observe(np.ones(10, dtype=np.int64), 10.0)
    assert meter.velocity().tolist() == [0.0, 1.0]


def test_rates_fall_while_nothing_arrives() -> None:
    meter = VelocityMeter(1, length=10, buckets=10)
    meter.advance(3.0)
    assert meter.velocity().tolist() == [0.0]
    meter.observe(np.zeros(10, dtype=np.int64), 0.0)
    assert meter.velocity().tolist() == [10.0]
    meter.advance(4.0)
    assert meter.velocity().tolist() == [2.0]
    meter.advance(1000.0)
    assert meter.velocity().tolist() == [0.0]


def test_a_clock_that_jumps_back_loses_nothing() -> None:
    meter = VelocityMeter(1, length=10, buckets=10)
    meter.observe(np.array([0]), 86_400.0)
    meter.observe(np.array([0]), 0.0)
    meter.advance(0.0)
    assert meter.velocity().tolist() == [2.0]


@pytest.mark.parametrize("seconds", [20, 290, 310, 3500, 5000])
def test_a_new_meter_has_the_right_rate_long_before_its_window_is_full(seconds: int) -> None:
    meter = VelocityMeter(1, length=3600, buckets=12, least=10)
    times = 86_400.0 + np.arange(0, seconds, 0.5)
    meter.observe(np.zeros(len(times), dtype=np.int64), times)
    assert meter.velocity()[0] == pytest.approx(2.0, rel=0.05)
    assert meter.velocity()[0] * meter.span() == pytest.approx(
        min(len(times), meter.velocity()[0] * 3600), rel=0.1
    )


def test_the_first_samples_are_not_taken_for_a_flood() -> None:
    meter = VelocityMeter(1, length=3600, buckets=12, least=10)
    meter.observe(np.zeros(5, dtype=np.int64), 3.0)
    assert meter.velocity().tolist() == [0.5]


arrivals = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 50)), max_size=30)


@settings(deadline=None)
@given(arrivals, st.lists(st.integers(0, 30), max_size=5), st.sampled_from([None, 0.5]))
def test_neither_chunks_nor_restarts_matter(
    samples: list[tuple[int, float]], cuts: list[int], least: float | None
) -> None:

    def meter() -> VelocityMeter:
        return VelocityMeter(3, length=7, buckets=3, least=least)

    samples = sorted(samples, key=lambda sample: sample[1])
    regions = np.array([region for region, _ in samples], dtype=np.int64)
    times = np.array([time for _, time in samples], dtype=np.float64)
    whole, parts = (meter() for _ in range(2))
    whole.observe(regions, times)
    edges = sorted({0, len(samples), *(cut for cut in cuts if cut <= len(samples))})
    for start, end in pairwise(edges):
        parts.observe(regions[start:end], times[start:end])
        state, parts = parts.snapshot(), meter()
        parts.restore(state)
    assert whole.velocity().tolist() == parts.velocity().tolist()


def test_memory_does_not_grow() -> None:
    meter = VelocityMeter(3)
    before = {name: array.shape for name, array in meter.snapshot().items()}
    for time in range(1000):
        meter.observe(np.zeros(50, dtype=np.int64), float(time))
    assert {name: array.shape for name, array in meter.snapshot().items()} == before
    assert meter.velocity().tolist() == [50.0, 0.0, 0.0]


def test_unsound_options_and_snapshots_are_refused() -> None:
    with pytest.raises(ValueError, match="length must be above 0, got 0"):
        VelocityMeter(3, length=0)
    with pytest.raises(ValueError, match="least must be above 0, got 0"):
        VelocityMeter(3, least=0)
    with pytest.raises(ValueError, match="buckets must be 1 or more, got 0"):
        VelocityMeter(3, buckets=0)
    with pytest.raises(ValueError, match="counts must be of shape"):
        VelocityMeter(3).restore(VelocityMeter(2).snapshot())
