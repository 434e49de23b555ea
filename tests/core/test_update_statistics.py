"""What is usual in a fleet, and what a robust mean makes of updates that are not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.types import DeviceId, Report, Vector
from fedkeep.core.usual import MIN_OBSERVATIONS, UpdateStatistics

MODEL: Vector = np.zeros(40, dtype=np.float32)
WAY = np.ones(40) / np.sqrt(40)


def report(update: np.ndarray, weight: float = 1.0) -> Report:
    return Report(0, (MODEL + update).astype(np.float32), weight, 1, 1, None)


def honest(round_: int, devices: int = 9) -> dict[DeviceId, Report]:
    """Updates of length near 1 that share a third of their way, as in the tasks."""
    rng = np.random.default_rng(round_)
    return {d: report(0.4 * WAY + rng.standard_normal(40) / np.sqrt(40)) for d in range(devices)}


def mean_step(reports: dict[DeviceId, Report]) -> np.ndarray:
    weights = np.array([r.weight for r in reports.values()])
    return weights @ np.array([r.model for r in reports.values()], dtype=np.float64) / weights.sum()


def lengths(reports: dict[DeviceId, Report]) -> list[float]:
    return [float(np.linalg.norm(r.model)) for r in reports.values()]


def test_at_the_start_nothing_is_too_long_and_then_ten_times_the_median_is() -> None:
    usual = UpdateStatistics()
    assert usual.longest([1.0] * (MIN_OBSERVATIONS - 1), 10.0) == np.inf
    assert usual.longest([1.0, 1.0, 1.0, 2.0, 999.0], 10.0) == 10.0
    usual.learn_lengths([2.0] * 6)
    assert usual.longest([999.0], 10.0) == 20.0


def test_a_liar_cannot_teach_that_long_is_usual() -> None:
    usual = UpdateStatistics()
    for _ in range(50):
        usual.learn_lengths([1.0] * 7 + [9.0] * 3)
    assert usual.longest([], 10.0) == 10.0


def test_where_the_world_changes_the_limit_follows_and_nobody_is_shut_out_for_ever() -> None:
    usual = UpdateStatistics()
    usual.learn_lengths([1.0] * 50)
    rounds = 0
    while usual.longest([900.0] * 2, 10.0) < 900.0:
        usual.learn_lengths([900.0] * 2)
        rounds += 1
    assert 0 < rounds <= 13


def test_updates_that_got_shorter_do_not_make_news_unheard_of() -> None:
    usual = UpdateStatistics()
    usual.learn_lengths([1.0] * 50)
    for _ in range(30):
        usual.learn_lengths([0.01] * 5)
    assert usual.longest([0.01] * 4, 10.0) > 5.0


def test_updates_that_move_nothing_do_not_make_every_other_too_long() -> None:
    usual = UpdateStatistics()
    usual.learn_lengths([0.0] * 30 + [1.0] * 6)
    assert usual.longest([0.0, 1.0], 10.0) == 10.0


def test_weights_that_differ_widely_count_and_those_of_liars_do_not() -> None:
    usual = UpdateStatistics()
    weights = [1.0, 2.0, 4.0, 8.0, 16.0, 1.0, 2.0, 4.0, 8.0]
    for round_ in range(8):
        reports = {d: report(r.model, weights[d]) for d, r in honest(round_).items()}
        tamed, _ = usual.tame(MODEL, {**reports, 99: report(-WAY, 16.0)})
    assert tamed[4].weight == 16
    assert tamed[99].weight == 0


@pytest.mark.parametrize("factor", [-1.0, -10.0, 1.0])
def test_a_gist_that_its_own_update_contradicts_does_not_count(factor: float) -> None:
    reports = {
        d: replace(r, local_gradient=(-3 * r.model).astype(np.float32))
        for d, r in honest(0).items()
    }
    gist = reports[4].local_gradient
    assert gist is not None
    reports[4] = replace(reports[4], local_gradient=(factor * gist).astype(np.float32))
    tamed, outvoted = UpdateStatistics().tame(MODEL, reports)
    assert not outvoted
    assert [d for d, r in tamed.items() if r.local_gradient is None] == ([] if factor > 0 else [4])


def test_gists_that_noise_has_hidden_all_count() -> None:
    rng = np.random.default_rng(0)
    model, noise = (
        np.zeros(4000, dtype=np.float32),
        rng.standard_normal((2, 20, 4000)).astype(np.float32),
    )
    reports = {d: Report(0, noise[0, d], 1.0, 1, 1, noise[1, d]) for d in range(20)}
    tamed, _ = UpdateStatistics().tame(model, reports)
    assert all(r.local_gradient is not None for r in tamed.values())


def test_who_goes_against_the_fleet_does_not_count_by_its_gist_either() -> None:
    usual = UpdateStatistics()
    for round_ in range(6):
        reports = {**honest(round_), 99: report(-WAY)}
        reports = {d: replace(r, local_gradient=-r.model) for d, r in reports.items()}
        tamed, _ = usual.tame(MODEL, reports)
    assert tamed[99].local_gradient is None


def test_an_honest_round_keeps_its_length_and_direction() -> None:
    reports = honest(0)
    tamed, outvoted = UpdateStatistics().tame(MODEL, reports)
    plain, robust = mean_step(reports), mean_step(tamed)
    assert not outvoted
    assert np.linalg.norm(robust) == pytest.approx(np.linalg.norm(plain), rel=0.1)
    assert robust @ plain / np.linalg.norm(robust) / np.linalg.norm(plain) > 0.95


@pytest.mark.parametrize("factor", [-1.0, -3.0])
def test_a_device_that_goes_against_the_fleet_stops_counting(factor: float) -> None:
    usual = UpdateStatistics()
    for round_ in range(6):
        reports = {**honest(round_), 99: report(factor * WAY)}
        tamed, outvoted = usual.tame(MODEL, reports)
        usual.learn_lengths(lengths(reports))
    assert outvoted == [99]
    assert tamed[99].weight == 0
    assert mean_step(tamed) @ WAY > 0.8 * (mean_step(honest(5)) @ WAY)


def across(round_: int) -> Report:
    """An update that has nothing to do with where the others go."""
    push = np.random.default_rng(1000 + round_).standard_normal(40)
    push -= (push @ WAY) * WAY
    return report(push / np.linalg.norm(push))


def test_a_device_that_hardly_goes_with_the_fleet_counts_little_and_is_not_named() -> None:
    usual = UpdateStatistics()
    for round_ in range(12):
        tamed, outvoted = usual.tame(MODEL, {**honest(round_), 99: across(round_)})
        assert outvoted == []
    assert tamed[99].weight < 0.3
    assert min(tamed[d].weight for d in range(9)) > 0.5


def test_among_few_devices_nobody_is_unusual() -> None:
    usual = UpdateStatistics()
    for round_ in range(12):
        tamed, _ = usual.tame(
            MODEL, {**honest(round_, devices=MIN_OBSERVATIONS - 2), 99: across(round_)}
        )
    assert {r.weight for r in tamed.values()} == {1.0}


def test_a_round_of_nobody_but_those_who_go_against_the_fleet_moves_nothing_and_spoils_nothing() -> (
    None
):
    usual = UpdateStatistics()
    for round_ in range(20):
        usual.tame(MODEL, {**honest(round_), 99: report(-WAY)})
    before = usual.snapshot()["heading"]
    assert usual.tame(MODEL, {99: report(-WAY)})[0][99].weight == 0
    assert np.array_equal(usual.snapshot()["heading"], before)
    tamed, outvoted = usual.tame(MODEL, {**honest(20), 99: report(-WAY)})
    assert outvoted == [99]
    assert mean_step(tamed) @ WAY > 0.8 * (mean_step(honest(20)) @ WAY)


def test_one_that_was_honest_before_is_found_within_some_rounds() -> None:
    usual = UpdateStatistics()
    for round_ in range(20):
        usual.tame(MODEL, honest(round_))
    found = [
        round_
        for round_ in range(20, 30)
        if usual.tame(MODEL, {**honest(round_), 3: report(-WAY)})[1] == [3]
    ]
    assert found
    assert found[0] <= 25


def test_a_weight_out_of_all_proportion_counts_as_weights_usually_do() -> None:
    reports = {d: report(WAY, weight) for d, weight in enumerate([1.0, 1.1, 1.2, 1.3, 1e9])}
    tamed, _ = UpdateStatistics().tame(MODEL, reports)
    assert [r.weight for r in tamed.values()][:4] == [1.0, 1.1, 1.2, 1.3]
    assert tamed[4].weight < 2


def test_a_device_that_forgets_and_comes_back_from_a_file_is_the_same() -> None:
    usual, again = UpdateStatistics(), UpdateStatistics()
    for round_ in range(3):
        usual.tame(MODEL, honest(round_))
        usual.learn_lengths(lengths(honest(round_)))
    again.restore(usual.snapshot())
    one, other = usual.tame(MODEL, honest(9))[0], again.tame(MODEL, honest(9))[0]
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
    tamed, _ = UpdateStatistics().tame(MODEL, reports)
    assert np.isfinite([r.model for r in tamed.values()]).all()
    if any(r.weight > 0 for r in tamed.values()):
        assert np.linalg.norm(mean_step(tamed)) <= 2.01 * max(lengths(reports)) + 1e-6


def test_without_weight_nothing_is_learnt() -> None:
    reports = {0: report(WAY, weight=0.0)}
    tamed, outvoted = UpdateStatistics().tame(MODEL, reports)
    assert tamed == reports
    assert not outvoted
