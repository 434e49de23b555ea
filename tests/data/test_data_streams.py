"""Invariants of streams: endless, exact in rate, each sample once a pass.

And blind to how they are cut.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import ConfigError
from fedkeep.core.types import Batch
from fedkeep.data import Federation, ModelSpec, Ownership, Stream, StreamOptions
from fedkeep.data.synthetic import Demo

_ORDERS = st.sampled_from([{}, {"shuffle": False}, {"burst": 0.5}, {"burst": 7.0}])
OPTIONS = st.builds(
    lambda order, **rest: StreamOptions(**order, **rest),
    order=_ORDERS,
    rounds_per_pass=st.integers(1, 40),
    drift=st.sampled_from([0.0, 0.5, 1.0]),
    drift_passes=st.integers(1, 3),
    label_noise=st.sampled_from([0.0, 0.4]),
    outliers=st.sampled_from([0.0, 0.3]),
    encoding=st.sampled_from(["float32", "float16", "int8"]),
)


def federation(sizes: tuple[int, ...] = (1, 7, 60), labels: int = 4) -> Federation:
    n = sum(sizes)
    rng = np.random.default_rng(0)
    members = Ownership.from_assignment(np.repeat(np.arange(len(sizes)), sizes), len(sizes))
    nothing = Ownership.from_assignment(np.full(n, -1), len(sizes))
    x = rng.normal(size=(n, 3)).astype(np.float32)
    names = tuple("abcdefghij"[:labels])
    return Federation(
        "toy", x, np.arange(n) % labels, members, nothing, names, ModelSpec("softmax")
    )


FLEET = federation()


def assert_same(one: Batch, other: Batch) -> None:
    for a, b in ((one.ids, other.ids), (one.y, other.y), (one.x, other.x)):
        np.testing.assert_array_equal(a, b)


@settings(deadline=None)
@given(
    options=OPTIONS,
    device=st.integers(0, 2),
    cuts=st.lists(st.integers(0, 90), min_size=1, max_size=5),
)
def test_cutting_the_rounds_anywhere_changes_nothing(
    options: StreamOptions, device: int, cuts: list[int]
) -> None:
    bounds = [0, *sorted(cuts), 90]
    whole = Stream(FLEET, options, seed=5).arrivals(device, 0, 90)
    pieces = [Stream(FLEET, options, seed=5).arrivals(device, a, b) for a, b in pairwise(bounds)]
    assert_same(whole, Batch.concatenate(pieces))


@settings(deadline=None)
@given(options=OPTIONS, device=st.integers(0, 2), passes=st.integers(0, 5))
def test_each_cycle_brings_every_sample_equally_often(
    options: StreamOptions, device: int, passes: int
) -> None:
    cycle = options.drift_passes if options.drift else 1
    size = int(FLEET.train.sizes[device])
    batch = Stream(FLEET, options, seed=1).between(
        device, passes * cycle * size, (passes + 1) * cycle * size
    )
    assert np.unique(batch.ids, return_counts=True)[1].tolist() == [cycle] * size
    assert set(batch.ids) == set(FLEET.train.of(device))


@settings(deadline=None)
@given(rounds_per_pass=st.integers(1, 600), t=st.integers(0, 2000))
def test_the_rate_is_the_devices_size_over_a_pass(rounds_per_pass: int, t: int) -> None:
    stream = Stream(FLEET, StreamOptions(rounds_per_pass=rounds_per_pass), seed=0)
    assert stream.position(2, t) == 60 * t // rounds_per_pass
    assert stream.position(2, rounds_per_pass) == 60
    assert stream.rates[2] == 60 / rounds_per_pass


def test_the_tasks_own_pass_length_is_the_default() -> None:
    assert Stream(FLEET, StreamOptions(), seed=0).position(2, 500) == 60


def test_every_pass_is_reshuffled_and_depends_on_seed_and_device() -> None:
    fleet = federation((60, 60))

    def one_pass(seed: int, device: int, number: int) -> list[int]:
        batch = Stream(fleet, StreamOptions(), seed).between(device, 60 * number, 60 * (number + 1))
        return [int(i) - 60 * device for i in batch.ids]

    orders = [one_pass(0, 0, 0), one_pass(0, 0, 1), one_pass(1, 0, 0), one_pass(0, 1, 0)]
    assert len({tuple(order) for order in orders}) == 4


def test_without_shuffling_the_order_of_the_data_repeats() -> None:
    batch = Stream(FLEET, StreamOptions(shuffle=False), seed=0).between(1, 0, 21)
    assert batch.ids.tolist() == [1, 2, 3, 4, 5, 6, 7] * 3


def test_full_drift_brings_one_label_after_the_other_on_all_devices() -> None:
    fleet = federation((80, 40))
    stream = Stream(fleet, StreamOptions(drift=1.0), seed=3)
    runs = [stream.between(device, 0, size).y.reshape(4, -1) for device, size in ((0, 80), (1, 40))]
    assert all(len(set(row)) == 1 for run in runs for row in run)
    assert runs[0][:, 0].tolist() == runs[1][:, 0].tolist()


def test_half_drift_shifts_the_labels_without_separating_them() -> None:
    fleet = federation((4000,))
    y = Stream(fleet, StreamOptions(drift=0.5), seed=3).between(0, 0, 4000).y
    first, last = (np.bincount(part, minlength=4) / len(part) for part in (y[:1000], y[-1000:]))
    assert np.abs(first - last).sum() > 1
    assert first.max() < 0.95


def test_drift_over_two_passes_is_half_as_fast() -> None:
    fleet = federation((400,))
    stream = Stream(fleet, StreamOptions(drift=1.0, drift_passes=2), seed=3)
    assert len(set(stream.between(0, 0, 200).y)) == 1
    assert len(set(stream.between(0, 0, 400).y)) == 2


def test_label_noise_strikes_its_share_and_sticks_to_the_sample() -> None:
    fleet = federation((5000,), labels=4)
    stream = Stream(fleet, StreamOptions(label_noise=0.3), seed=0)
    seen = stream.between(0, 0, 10_000)
    wrong = seen.y != fleet.y[seen.ids]
    assert 0.27 < wrong.mean() < 0.33
    assert set(seen.y) == {0, 1, 2, 3}
    for sample in (seen.ids[wrong][0], seen.ids[~wrong][0]):
        assert len(set(seen.y[seen.ids == sample])) == 1
    np.testing.assert_array_equal(fleet.y, federation((5000,), labels=4).y)


def test_outliers_are_far_away_and_leave_the_data_untouched() -> None:
    fleet = federation((5000,))
    before = fleet.x.copy()
    seen = Stream(fleet, StreamOptions(outliers=0.1, outlier_scale=100.0), seed=0).training_set(0)
    replaced = (seen.x != fleet.x[seen.ids]).any(axis=1)
    assert 0.08 < replaced.mean() < 0.12
    assert np.abs(seen.x[replaced]).mean() > 30
    np.testing.assert_array_equal(fleet.x, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drift": 1.5}, "drift must be between 0 and 1, got 1.5"),
        ({"label_noise": -0.1}, "label_noise must be between 0 and 1"),
        ({"rounds_per_pass": 0}, "rounds_per_pass must be 1 or more, got 0"),
        ({"drift_passes": 0}, "drift_passes must be 1 or more, got 0"),
        ({"outlier_scale": -1}, "outlier_scale must be 0 or more"),
        ({"burst": -1.0}, "burst must be 0 or more"),
        ({"burst": 2.0, "shuffle": False}, "leave out shuffle = false"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamOptions(**options)


def test_a_label_lasts_as_long_as_asked_at_each_device_by_itself() -> None:
    """Ten arrivals a round, bursts of two rounds.

    20 arrivals, 4/3 of that since one in four follows its like.
    """
    fleet = federation((60_000, 60_000), labels=4)
    stream = Stream(fleet, StreamOptions(rounds_per_pass=6000, burst=2.0), seed=0)
    one, other = (stream.between(device, 0, 60_000).y for device in (0, 1))
    assert len(one) / (np.diff(one) != 0).sum() == pytest.approx(20 * 4 / 3, rel=0.05)
    assert (one == other).mean() == pytest.approx(0.25, abs=0.02)


@settings(deadline=None)
@given(options=OPTIONS, device=st.integers(0, 2), last=st.integers(0, 90))
def test_every_arrival_has_its_round(options: StreamOptions, device: int, last: int) -> None:
    stream = Stream(FLEET, options, seed=0)
    counted = np.bincount(stream.rounds(device, 0, stream.position(device, last)), minlength=last)
    assert counted.tolist() == [len(stream.arrivals(device, r, r + 1)) for r in range(last)]


def test_what_was_seen_before_a_round_grows_to_the_whole_and_no_further() -> None:
    stream = Stream(FLEET, StreamOptions(rounds_per_pass=10), seed=0)
    assert [len(stream.seen_before(2, r)) for r in (0, 1, 5, 10, 37)] == [0, 6, 30, 60, 60]
    assert set(stream.seen_before(2, 37).ids) == set(stream.training_set(2).ids)


def test_an_encoded_stream_brings_the_same_samples_a_little_rounded() -> None:
    fleet = federation((500,))
    streams = {
        name: Stream(fleet, StreamOptions(encoding=name), seed=0)
        for name in ("float32", "int8", "float16")
    }
    plain, eight, half = (stream.between(0, 0, 500) for stream in streams.values())
    assert plain.ids.tolist() == eight.ids.tolist()
    largest = np.abs(plain.x).max()
    assert 0 < np.abs(eight.x - plain.x).max() < 0.02 * largest
    assert 0 < np.abs(half.x - plain.x).max() < 0.001 * largest
    np.testing.assert_array_equal(streams["int8"].training_set(0).x, fleet.x)


def test_a_deflated_stream_rounds_what_does_not_fit() -> None:
    wide = replace(
        federation((50,)), x=np.random.default_rng(0).normal(size=(50, 200)).astype(np.float32)
    )
    tight, plain = (
        Stream(wide, StreamOptions(deflate_to=limit), seed=0).between(0, 0, 50)
        for limit in (500, None)
    )
    assert 0 < np.abs(tight.x - plain.x).max() < 0.01 * np.abs(plain.x).max()
    with pytest.raises(ConfigError, match="deflate_to must be from 82 to below the 800 bytes"):
        Stream(wide, StreamOptions(deflate_to=800), seed=0).between(0, 0, 50)


@pytest.mark.parametrize("delay", [1, 3, "pass"])
def test_each_label_comes_once_and_as_late_as_it_should(delay: Any) -> None:
    options = StreamOptions(rounds_per_pass=7, label_delay=delay, labelled=0.5)
    stream = Stream(Demo(devices=2, smallest=40, largest=60).load(seed=0), options, seed=1)
    for device in (0, 1):
        came = [stream.arrivals(device, r, r + 1) for r in range(14)]
        due = [stream.labels_due(device, r) for r in range(14)]
        for round_, batch in enumerate(came):
            if delay == "pass":
                then = 6 if round_ < 7 else 13
            elif (then := round_ + delay) >= 14:
                continue
            known = batch.take(stream.labelled(batch.ids))
            labels = dict(zip(due[then].ids.tolist(), due[then].y.tolist(), strict=True))
            for id_, y in zip(known.ids.tolist(), known.y.tolist(), strict=True):
                assert labels[id_] == y
        counted = sum(len(batch) for batch in due)
        whole = stream.between(
            device, 0, stream.position(device, 14 if delay == "pass" else 14 - delay)
        )
        assert counted == int(stream.labelled(whole.ids).sum())
        share = stream.labelled(whole.ids).mean()
        assert 0.2 < share < 0.8


def test_streams_without_late_labels_are_not_late() -> None:
    data = Demo(devices=1, smallest=40, largest=40).load(seed=0)
    assert not Stream(data, StreamOptions(), seed=0).late
    assert Stream(data, StreamOptions(labelled=0.5), seed=0).late
    assert not Stream(data, StreamOptions(labelled=0.5), seed=0).delayed
    with pytest.raises(ValueError, match="label_delay"):
        StreamOptions(label_delay=-1)
