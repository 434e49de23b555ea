"""Faults 5 to 11: what comes from outside is checked before it counts."""

from dataclasses import replace

import numpy as np
import pytest

from fedkeep.core.claims import cap_profiles
from fedkeep.core.errors import RejectedError
from fedkeep.core.outliers import robust_cap
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.screening import Limits, screen_profile, screen_report, screen_samples
from fedkeep.core.types import Profile, Report, Vector

LIMITS = Limits(update_norm=10.0, gradient_norm=10.0)
MODEL: Vector = np.ones(4, dtype=np.float32)
GOOD = Report(0, MODEL + np.float32(0.1), 2.0, 5, 3, np.ones(2, dtype=np.float32), 7)


def model_with(value: float) -> Vector:
    model = MODEL.copy()
    model[2] = value
    return model


def screen(report: Report, max_weight: float = 100.0) -> Report:
    return screen_report(report, MODEL, 2, max_weight, LIMITS)


def test_a_valid_report_passes_whole() -> None:
    screened = screen(GOOD)
    assert screened.weight == 2.0
    np.testing.assert_array_equal(screened.model, GOOD.model)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(GOOD, model=model_with(np.nan)), "model-not-finite"),
        (replace(GOOD, model=model_with(np.inf)), "model-not-finite"),
        (replace(GOOD, model=model_with(1e30)), "large-update"),
        (replace(GOOD, model=np.zeros(4, dtype=np.float32)), "zero-model"),
        (replace(GOOD, model=np.ones(5, dtype=np.float32)), "model-shape"),
        (replace(GOOD, model=np.ones((1, 4), dtype=np.float32)), "model-shape"),
        (replace(GOOD, model=np.ones(1, dtype=np.float32)), "model-shape"),
        (replace(GOOD, model=np.ones(4)), "model-dtype"),
        (replace(GOOD, model=[1.0] * 4), "model-shape"),
        (
            replace(GOOD, local_gradient=np.full(2, np.nan, dtype=np.float32)),
            "estimator-not-finite",
        ),
        (replace(GOOD, local_gradient=np.full(2, 1e30, dtype=np.float32)), "large-estimator"),
        (replace(GOOD, local_gradient=np.ones(1, dtype=np.float32)), "estimator-shape"),
        (replace(GOOD, local_gradient=np.ones(2)), "estimator-dtype"),
        (replace(GOOD, weight=float("nan")), "bad-weight"),
        (replace(GOOD, weight=float("inf")), "bad-weight"),
        (replace(GOOD, weight=-1e6), "bad-weight"),
        (replace(GOOD, steps=-1), "bad-count"),
    ],
)
def test_an_invalid_report_is_rejected_by_reason(bad: Report, reason: str) -> None:
    with pytest.raises(RejectedError) as error:
        screen(bad)
    assert error.value.reason == reason


def test_a_weight_beyond_what_the_device_can_hold_is_cut() -> None:
    assert screen(replace(GOOD, weight=1e12), max_weight=30.0).weight == 30.0


def test_a_declared_rate_is_bounded_by_the_fleet_and_by_the_devices_past() -> None:
    rates = np.array([3.0, 3.0, 3.0, 1e12, 10.0])
    before = np.array([np.nan, np.nan, np.nan, np.nan, 0.5])
    claimed = FleetProfiles.numbered(np.ones(5), rates[:, None])
    fleet, counted, rejections = cap_profiles(claimed, before, growth=10.0)
    np.testing.assert_allclose(counted, [3, 3, 3, 12, 5])
    np.testing.assert_allclose(fleet.velocities[:, 0], [3, 3, 3, 12, 5])
    assert [(rejection.device, rejection.reason) for rejection in rejections] == [
        (3, "rate-cut"),
        (4, "rate-cut"),
    ]


def test_the_fleet_itself_tells_how_much_a_claim_counts() -> None:
    """Four times the median where claims are alike; three deviations where they differ."""
    alike = np.array([10.0, 10.0, 11.0, 9.0, 1e15])
    assert robust_cap(alike) == pytest.approx(40.0)
    unlike = np.exp([-2.0, -1.0, 0.0, 1.0, 2.0])
    assert robust_cap(unlike) == pytest.approx(np.exp(3 * 1.4826))
    assert robust_cap(np.zeros(3)) == np.inf


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (Profile(-1, np.ones(3)), "bad-capacity"),
        (Profile(5, np.array([1.0, np.nan, 1.0])), "velocity-not-finite"),
        (Profile(5, np.array([1.0, -1.0, 1.0])), "negative-velocity"),
        (Profile(5, np.array([1.0, 1e31, 1.0])), "velocity-too-large"),
        (Profile(5, np.ones(2)), "velocity-shape"),
        (Profile(5, np.ones((1, 3))), "velocity-shape"),
        (Profile(5, np.ones(3, dtype=np.float32)), "velocity-dtype"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_profile_is_rejected_by_reason(profile: Profile, reason: str) -> None:
    with pytest.raises(RejectedError) as error:
        screen_profile(profile, regions=3)
    assert error.value.reason == reason


def test_bad_samples_are_counted_by_reason_and_never_index_anything() -> None:
    x = np.zeros((5, 2), dtype=np.float32)
    x[3, 1] = np.nan
    valid, rejected = screen_samples(x, np.array([0, 3, -1, 1, 2]), (2,), labels=3)
    assert valid.tolist() == [True, False, False, False, True]
    assert rejected == {"label": 2, "not-finite": 1}


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (np.zeros((2, 3)), np.array([0, 1]), "shape"),
        (np.zeros((2, 2, 1)), np.array([0, 1]), "shape"),
        (np.array([["a", "b"], ["c", "d"]]), np.array([0, 1]), "shape"),
        (np.zeros((2, 2)), np.array(["0", "1"]), "label"),
        (np.zeros((2, 2)), np.array([0.5, np.nan]), "label"),
        (np.zeros((2, 2)), np.array([2**40, -(2**40)]), "label"),
    ],
)
def test_samples_of_another_kind_are_rejected(x: np.ndarray, y: np.ndarray, reason: str) -> None:
    valid, rejected = screen_samples(x, y, (2,), labels=3)
    assert not valid.any()
    assert rejected == {reason: 2}


def test_whole_numbers_written_as_floats_are_labels() -> None:
    assert screen_samples(np.zeros((2, 2)), np.array([0.0, 2.0]), (2,), labels=3)[0].all()
