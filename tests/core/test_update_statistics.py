"""What the fleet's updates have been like, and how the robust mean weighs those that differ."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.aggregation import RobustMean
from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.outliers import MIN_OBSERVATIONS
from fedkeep.core.types import DeviceId, Report, Vector

MODEL: Vector = np.zeros(40, dtype=np.float32)
WAY = np.ones(40) / np.sqrt(40)


def report(update: np.ndarray, weight: float = 1.0) -> Report:
    return Report(0, (MODEL + update).astype(np.float32), weight, 1, 1, None)


def honest(round_: int, devices: int = 9) -> dict[DeviceId, Report]:
    """Updates of length near 1 that share a third of their way, as in the tasks."""
    rng = np.random.default_rng(round_)
    return {d: report(0.4 * WAY + rng.standard_normal(40) / np.sqrt(40)) for d in range(devices)}


Reweighted = tuple[dict[DeviceId, Report], tuple[DeviceId, ...]]


def reweight(reports: dict[DeviceId, Report]) -> Reweighted:
    """A round of a fleet of which nothing is known."""
    return reweight_for(UpdateStatistics(), reports)


def reweight_for(statistics: UpdateStatistics, reports: dict[DeviceId, Report]) -> Reweighted:
    return reweight_from(MODEL, statistics, reports)


def reweight_from(
    model: Vector, statistics: UpdateStatistics, reports: dict[DeviceId, Report]
) -> Reweighted:
    merged = RobustMean().merge(model, reports, statistics)
    counted = {d: replace(r, model=merged.model_of(d)) for d, r in merged.reports.items()}
    return counted, merged.filtered


def mean_step(reports: dict[DeviceId, Report]) -> np.ndarray:
    weights = np.array([r.weight for r in reports.values()])
    return weights @ np.array([r.model for r in reports.values()], dtype=np.float64) / weights.sum()


def lengths(reports: dict[DeviceId, Report]) -> list[float]:
    return [float(np.linalg.norm(r.model)) for r in reports.values()]


def test_at_the_start_nothing_is_too_long_and_then_ten_times_the_median_is() -> None:
    statistics = UpdateStatistics()
    assert statistics.max_length([1.0] * (MIN_OBSERVATIONS - 1), 10.0) == np.inf
    assert statistics.max_length([1.0, 1.0, 1.0, 2.0, 999.0], 10.0) == 10.0
    statistics.learn_lengths([2.0] * 6)
    assert statistics.max_length([999.0], 10.0) == 20.0


def test_an_attacker_cannot_raise_the_usual_length() -> None:
    statistics = UpdateStatistics()
    for _ in range(50):
        statistics.learn_lengths([1.0] * 7 + [9.0] * 3)
    assert statistics.max_length([], 10.0) == 10.0


def test_the_limit_follows_a_change_and_no_device_is_excluded_for_ever() -> None:
    statistics = UpdateStatistics()
    statistics.learn_lengths([1.0] * 50)
    rounds = 0
    while statistics.max_length([900.0] * 2, 10.0) < 900.0:
        statistics.learn_lengths([900.0] * 2)
        rounds += 1
    assert 0 < rounds <= 13


def test_shorter_updates_do_not_get_later_ones_rejected() -> None:
    statistics = UpdateStatistics()
    statistics.learn_lengths([1.0] * 50)
    for _ in range(30):
        statistics.learn_lengths([0.01] * 5)
    assert statistics.max_length([0.01] * 4, 10.0) > 5.0


def test_updates_that_move_nothing_do_not_make_every_other_too_long() -> None:
    statistics = UpdateStatistics()
    statistics.learn_lengths([0.0] * 30 + [1.0] * 6)
    assert statistics.max_length([0.0, 1.0], 10.0) == 10.0


def test_weights_that_differ_widely_count_and_those_of_attackers_do_not() -> None:
    statistics = UpdateStatistics()
    weights = [1.0, 2.0, 4.0, 8.0, 16.0, 1.0, 2.0, 4.0, 8.0]
    for round_ in range(8):
        reports = {d: report(r.model, weights[d]) for d, r in honest(round_).items()}
        counted, _ = reweight_for(statistics, {**reports, 99: report(-WAY, 16.0)})
    assert counted[4].weight == 16
    assert counted[99].weight == 0


@pytest.mark.parametrize("factor", [-1.0, -10.0, 1.0])
def test_a_gist_that_its_own_update_contradicts_does_not_count(factor: float) -> None:
    reports = {
        d: replace(r, local_gradient=(-3 * r.model).astype(np.float32))
        for d, r in honest(0).items()
    }
    gist = reports[4].local_gradient
    assert gist is not None
    reports[4] = replace(reports[4], local_gradient=(factor * gist).astype(np.float32))
    counted, filtered = reweight(reports)
    assert not filtered
    assert [d for d, r in counted.items() if r.local_gradient is None] == (
        [] if factor > 0 else [4]
    )


def test_gists_that_noise_has_hidden_all_count() -> None:
    rng = np.random.default_rng(0)
    model, noise = (
        np.zeros(4000, dtype=np.float32),
        rng.standard_normal((2, 20, 4000)).astype(np.float32),
    )
    reports = {d: Report(0, noise[0, d], 1.0, 1, 1, noise[1, d]) for d in range(20)}
    counted, _ = reweight_from(model, UpdateStatistics(), reports)
    assert all(r.local_gradient is not None for r in counted.values())


def test_who_goes_against_the_fleet_does_not_count_by_its_gist_either() -> None:
    statistics = UpdateStatistics()
    for round_ in range(6):
        reports = {**honest(round_), 99: report(-WAY)}
        reports = {d: replace(r, local_gradient=-r.model) for d, r in reports.items()}
        counted, _ = reweight_for(statistics, reports)
    assert counted[99].local_gradient is None


def test_an_honest_round_keeps_its_length_and_direction() -> None:
    reports = honest(0)
    counted, filtered = reweight(reports)
    plain, robust = mean_step(reports), mean_step(counted)
    assert not filtered
    assert np.linalg.norm(robust) == pytest.approx(np.linalg.norm(plain), rel=0.1)
    assert robust @ plain / np.linalg.norm(robust) / np.linalg.norm(plain) > 0.95


@pytest.mark.parametrize("factor", [-1.0, -3.0])
def test_a_device_that_goes_against_the_fleet_stops_counting(factor: float) -> None:
    statistics = UpdateStatistics()
    for round_ in range(6):
        reports = {**honest(round_), 99: report(factor * WAY)}
        counted, filtered = reweight_for(statistics, reports)
        statistics.learn_lengths(lengths(reports))
    assert filtered == (99,)
    assert counted[99].weight == 0
    assert mean_step(counted) @ WAY > 0.8 * (mean_step(honest(5)) @ WAY)


def across(round_: int) -> Report:
    """An update that has nothing to do with where the others go."""
    push = np.random.default_rng(1000 + round_).standard_normal(40)
    push -= (push @ WAY) * WAY
    return report(push / np.linalg.norm(push))


def test_a_device_that_hardly_goes_with_the_fleet_counts_little_and_is_not_named() -> None:
    statistics = UpdateStatistics()
    for round_ in range(12):
        counted, filtered = reweight_for(statistics, {**honest(round_), 99: across(round_)})
        assert filtered == ()
    assert counted[99].weight < 0.3
    assert min(counted[d].weight for d in range(9)) > 0.5


def test_among_few_devices_none_is_an_outlier() -> None:
    statistics = UpdateStatistics()
    for round_ in range(12):
        counted, _ = reweight_for(
            statistics, {**honest(round_, devices=MIN_OBSERVATIONS - 2), 99: across(round_)}
        )
    assert {r.weight for r in counted.values()} == {1.0}


def test_a_round_of_conflicting_updates_alone_moves_nothing_and_spoils_nothing() -> None:
    statistics = UpdateStatistics()
    for round_ in range(20):
        reweight_for(statistics, {**honest(round_), 99: report(-WAY)})
    before = statistics.snapshot()["heading"]
    assert reweight_for(statistics, {99: report(-WAY)})[0][99].weight == 0
    assert np.array_equal(statistics.snapshot()["heading"], before)
    counted, filtered = reweight_for(statistics, {**honest(20), 99: report(-WAY)})
    assert filtered == (99,)
    assert mean_step(counted) @ WAY > 0.8 * (mean_step(honest(20)) @ WAY)


def test_one_that_was_honest_before_is_found_within_some_rounds() -> None:
    statistics = UpdateStatistics()
    for round_ in range(20):
        reweight_for(statistics, honest(round_))
    found = [
        round_
        for round_ in range(20, 30)
        if reweight_for(statistics, {**honest(round_), 3: report(-WAY)})[1] == (3,)
    ]
    assert found
    assert found[0] <= 25


def test_a_weight_out_of_all_proportion_counts_as_weights_usually_do() -> None:
    reports = {d: report(WAY, weight) for d, weight in enumerate([1.0, 1.1, 1.2, 1.3, 1e9])}
    counted, _ = reweight(reports)
    assert [r.weight for r in counted.values()][:4] == [1.0, 1.1, 1.2, 1.3]
    assert counted[4].weight < 2


def test_a_device_restored_from_a_file_is_the_same() -> None:
    statistics, again = UpdateStatistics(), UpdateStatistics()
    for round_ in range(3):
        reweight_for(statistics, honest(round_))
        statistics.learn_lengths(lengths(honest(round_)))
    again.restore(statistics.snapshot())
    one, other = reweight_for(statistics, honest(9))[0], reweight_for(again, honest(9))[0]
    assert all(one[d].model.tobytes() == other[d].model.tobytes() for d in one)
    again.forget(3)
    assert 3 not in again.snapshot()["devices"]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.integers(0, 5))
def test_whatever_comes_the_model_moves_no_further_than_twice_the_longest(
    scales: list[float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    reports = {
        d: report(scale * rng.standard_normal(40), weight=rng.random())
        for d, scale in enumerate(scales)
    }
    counted, _ = reweight(reports)
    assert np.isfinite([r.model for r in counted.values()]).all()
    if any(r.weight > 0 for r in counted.values()):
        assert np.linalg.norm(mean_step(counted)) <= 2.01 * max(lengths(reports)) + 1e-6


def test_without_weight_nothing_is_learnt() -> None:
    reports = {0: report(WAY, weight=0.0)}
    merged = RobustMean().merge(MODEL, reports, UpdateStatistics())
    counted, filtered = merged.reports, merged.filtered
    assert counted == reports
    assert not filtered
