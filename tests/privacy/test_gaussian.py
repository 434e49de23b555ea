"""The noise and its accounting, checked against two libraries and by sampling."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.estimators import clip_weights
from fedkeep.privacy.gaussian import budget_cost, clipped, epsilon_spent, system_normal
from fedkeep.privacy.options import PrivacyOptions

pytest.importorskip("dp_accounting", reason="needs the privacy extra")

import dp_accounting
from lab.amplification import amplified_epsilon


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_the_cost_of_a_budget_is_that_budget(epsilon: float, delta: float) -> None:
    assert epsilon_spent(budget_cost(epsilon, delta), delta) == pytest.approx(epsilon, rel=1e-6)


def test_costs_of_unlike_releases_compose_as_the_accountant_composes_them() -> None:
    multipliers = [0.9, 1.3, 4.0, 2.2]
    accountant = dp_accounting.pld.PLDAccountant()
    for multiplier in multipliers:
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier))
    ours = epsilon_spent(sum(m**-2 for m in multipliers), 1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def test_opacus_agrees_with_a_composition_of_fifty_releases() -> None:
    epsilon = _opacus_epsilon(noise=5.0, rate=1.0, steps=50, delta=1e-5)
    assert epsilon_spent(50 / 25.0, 1e-5) == pytest.approx(epsilon, rel=0.02)


def test_opacus_agrees_with_the_amplification_by_poisson_sampling() -> None:
    epsilon = _opacus_epsilon(noise=1.1, rate=0.05, steps=100, delta=1e-5)
    ours = amplified_epsilon(1.1, 100, 1e-5, participants=5, population=100, poisson=True)
    assert ours == pytest.approx(epsilon, rel=0.03)


def _opacus_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountants = pytest.importorskip(
            "opacus.accountants", reason="opacus, the cross-check, is missing"
        )
        accountant = accountants.PRVAccountant()
        accountant.history = [(noise, rate, steps)]
        return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("poisson", [True, False])
def test_sampling_amplifies_for_an_outsider(poisson: bool) -> None:
    most = 0.5 if poisson else 1.0
    epsilon = amplified_epsilon(4.0, 20, 1e-5, participants=5, population=100, poisson=poisson)
    assert epsilon < most * epsilon_spent(20 / 16.0, 1e-5)


def test_more_releases_need_more_noise() -> None:
    def multiplier(releases: int) -> float:
        return PrivacyOptions(
            epsilon=1.0, protect=("model",), planned_participations=releases
        ).noise_multiplier()

    assert multiplier(100) == pytest.approx(10 * multiplier(1))


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_a_budget_that_is_no_budget_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon must"):
        PrivacyOptions(epsilon=epsilon)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_outside_its_range_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta must"):
        PrivacyOptions(delta=delta)


def test_system_noise_is_standard_normal_and_never_repeats() -> None:
    draws = system_normal(200_000)
    assert abs(draws.mean()) < 0.02
    assert abs(draws.std() - 1) < 0.02
    assert abs((np.abs(draws) < 1).mean() - 0.6827) < 0.01
    assert abs((np.abs(draws) < 2).mean() - 0.9545) < 0.01
    assert not np.array_equal(system_normal(8), system_normal(8))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e30), min_size=1), st.floats(1e-3, 1e3))
def test_no_clipped_gradient_is_longer_than_the_clip(norms: list[float], clip: float) -> None:
    lengths = np.array(norms)
    weights = clip_weights(lengths, clip)
    assert (weights * lengths <= clip * (1 + 1e-9)).all()
    assert (weights[lengths <= clip] == 1).all()


def test_a_vector_is_shortened_and_not_turned() -> None:
    assert clipped(np.array([3.0, 4.0]), 1.0) == pytest.approx([0.6, 0.8])
    assert clipped(np.array([0.3, 0.4]), 1.0) == pytest.approx([0.3, 0.4])
    assert clipped(np.zeros(2), 1.0) == pytest.approx([0.0, 0.0])
