"""A fleet's accuracy by hand, and with a device that claims too much."""

import pytest

from fedkeep.core.rounds import merge_evaluations


def test_honest_counts_are_pooled() -> None:
    merged, cut = merge_evaluations({0: (10, 5.0, 5), 1: (30, 45.0, 27), 2: (0, 0.0, 0)})
    assert merged["samples"] == 40
    assert merged["loss"] == pytest.approx(50 / 40)
    assert merged["accuracy"] == pytest.approx(32 / 40)
    assert not cut


def test_the_robust_accuracy_leaves_out_both_ends() -> None:
    reported = {device: (10, 1.0, right) for device, right in enumerate([0, 4, 5, 6, 10])}
    assert merge_evaluations(reported)[0]["accuracy_robust"] == pytest.approx(0.5)


def test_one_that_claims_a_quadrillion_right_answers_is_cut_and_named() -> None:
    reported = dict.fromkeys(range(9), (10, 1.0, 5)) | {9: (10**15, 0.0, 10**15)}
    merged, cut = merge_evaluations(reported)
    assert merged["accuracy"] == pytest.approx((45 + 40) / 130)
    assert merged["accuracy_robust"] == pytest.approx(0.5)
    assert [(rejection.device, rejection.reason) for rejection in cut] == [(9, "count-cut")]


def test_one_loss_out_of_all_proportion_is_cut_and_named() -> None:
    reported = dict.fromkeys(range(9), (10, 10.0, 5)) | {9: (10, 1e300, 5)}
    merged, cut = merge_evaluations(reported)
    assert merged["loss"] == pytest.approx((90 + 1000) / 100)
    assert [(rejection.device, rejection.reason) for rejection in cut] == [(9, "loss-cut")]
    assert merge_evaluations({0: (9, 0.0, 9), 1: (9, 0.0, 9), 2: (9, 3.0, 8)})[1] == []


def test_without_samples_nothing_is_reported() -> None:
    assert merge_evaluations({0: (0, 0.0, 0)}) == ({}, [])
