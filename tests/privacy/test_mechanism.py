"""What the mechanism releases: noised, without an estimator, or nothing; charged before it goes."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from fedkeep.core.errors import RejectedError
from fedkeep.core.types import FloatArray, LocalTraining, Profile, Report, State, TrainOrder
from fedkeep.privacy.accountant import BudgetSpentError, PrivacyLedger
from fedkeep.privacy.mechanism import DPMechanism
from fedkeep.privacy.options import PrivacyOptions, Stream

pytest.importorskip("dp_accounting", reason="needs the privacy extra")

P = 4000
N = 50


def order(round_: int = 0, accepted: int | None = None) -> TrainOrder:
    return TrainOrder(
        round_, np.zeros(P, np.float32), None, LocalTraining(0.1, 1), accepted_round=accepted
    )


def report(round_: int = 0, *, weight: float = 3.0) -> Report:
    gradient = np.full(P, (0.5 - 0.001 * round_) / math.sqrt(P), np.float32)
    return Report(round_, np.full(P, 0.01, np.float32), weight, 1, 5, gradient, N)


def ones(size: int) -> FloatArray:
    return np.ones(size)


class Journal:
    """Remembers what was committed, in order."""

    def __init__(self) -> None:
        self.states: list[State] = []

    def commit(self, state: State) -> None:
        self.states.append(state)


def build_mechanism(
    options: PrivacyOptions, ledger: PrivacyLedger | None = None, journal: Journal | None = None
) -> DPMechanism:
    return DPMechanism(options, ledger or PrivacyLedger(), (journal or Journal()).commit, ones)


def test_without_an_epsilon_nothing_is_changed_or_charged() -> None:
    journal = Journal()
    sent = build_mechanism(PrivacyOptions(), journal=journal).release(report(), order())
    np.testing.assert_array_equal(sent.model, report().model)
    assert sent.local_gradient is not None
    np.testing.assert_array_equal(sent.local_gradient, report().local_gradient)
    assert journal.states == []


def test_a_samples_noise_shrinks_with_the_samples_and_a_devices_does_not() -> None:
    for unit, sensitivity in (("sample", 2 * 0.5 / N), ("device", 2 * 0.5)):
        options = PrivacyOptions(epsilon=1.0, clip=0.5, unit=unit)  # type: ignore[arg-type]
        sent = build_mechanism(options).release(report(), order()).local_gradient
        clean = report().local_gradient
        assert sent is not None
        assert clean is not None
        noisy = clean + options.noise_multiplier() * sensitivity
        shortened = noisy * min(1.0, 0.5 / float(np.linalg.norm(noisy)))
        np.testing.assert_allclose(sent, shortened, rtol=1e-3)


@pytest.mark.parametrize("protect", [("estimator",), ("model",)])
def test_noise_has_the_promised_size_and_no_result_is_longer_than_the_clip(
    protect: tuple[Stream, ...],
) -> None:
    options = PrivacyOptions(epsilon=50.0, clip=1.0, model_clip=1.0, protect=protect)
    multiplier, sensitivity = (
        options.noise_multiplier(),
        2 / 100 if protect == ("estimator",) else 2,
    )
    nothing = replace(
        report(),
        model=np.zeros(P, np.float32),
        local_gradient=np.zeros(P, np.float32),
        gradient_samples=100,
    )

    def released(scale: float) -> FloatArray:
        mechanism = DPMechanism(
            options,
            PrivacyLedger(),
            Journal().commit,
            lambda n: scale * np.random.default_rng(0).standard_normal(n),
        )
        sent = mechanism.release(nothing, order())
        vector = sent.local_gradient if protect == ("estimator",) else sent.model
        assert vector is not None
        return vector.astype(np.float64)

    assert released(1e-3).std() == pytest.approx(1e-3 * multiplier * sensitivity, rel=0.05)
    assert np.linalg.norm(released(1e3)) == pytest.approx(1.0)


def test_the_ledger_is_committed_before_the_noise_is_drawn() -> None:
    events: list[str] = []

    def draw(size: int) -> FloatArray:
        events.append("noise")
        return np.zeros(size)

    def commit(state: State) -> None:
        assert state["composed"][1] > 0
        events.append("commit")

    DPMechanism(PrivacyOptions(epsilon=1.0), PrivacyLedger(), commit, draw).release(
        report(), order()
    )
    assert events == ["commit", "noise"]


def test_nothing_leaves_when_the_ledger_cannot_be_committed() -> None:
    def full_disk(state: State) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        DPMechanism(PrivacyOptions(epsilon=1.0), PrivacyLedger(), full_disk, ones).release(
            report(), order()
        )


def test_sample_level_estimators_of_a_stream_never_run_out() -> None:
    ledger = PrivacyLedger()
    mechanism = build_mechanism(PrivacyOptions(epsilon=1.0), ledger)
    for round_ in range(30):
        sent = mechanism.release(report(round_), order(round_, round_ - 1 if round_ else None))
        assert sent.local_gradient is not None
    assert ledger.epsilon("sample", 1e-5) == pytest.approx(1.0)
    assert ledger.epsilon("device", 1e-5) > 100


def test_a_lost_estimator_is_not_sent_twice_unless_the_budget_planned_for_it() -> None:
    strict, lenient = (
        build_mechanism(PrivacyOptions(epsilon=1.0)),
        build_mechanism(PrivacyOptions(epsilon=1.0, retransmissions=1)),
    )
    for mechanism in (strict, lenient):
        assert mechanism.release(report(0), order(0)).local_gradient is not None
    assert strict.release(report(1), order(1)).local_gradient is None
    assert lenient.release(report(1), order(1)).local_gradient is not None
    assert strict.release(report(2), order(2, accepted=1)).local_gradient is not None
    assert lenient.release(report(2), order(2, accepted=0)).local_gradient is None


def test_the_same_estimator_goes_out_again_with_the_same_noise_and_for_nothing() -> None:
    ledger, journal = PrivacyLedger(), Journal()
    mechanism = DPMechanism(PrivacyOptions(epsilon=1.0), ledger, journal.commit)
    first = mechanism.release(report(0), order(0)).local_gradient
    again = mechanism.release(replace(report(0), round=1), order(1)).local_gradient
    assert first is not None
    assert again is not None
    np.testing.assert_array_equal(first, again)
    assert ledger.snapshot()["releases"][0] == len(journal.states) == 1


def test_spending_tells_both_units_and_what_is_left() -> None:
    mechanism = build_mechanism(
        PrivacyOptions(epsilon=2.0, unit="device", planned_participations=4)
    )
    assert mechanism.spending().left == 2.0
    for round_ in range(4):
        mechanism.release(report(round_), order(round_))
    spending = mechanism.spending()
    assert spending.device_epsilon == pytest.approx(2.0)
    assert spending.sample_epsilon < 0.1
    assert spending.left == pytest.approx(0.0, abs=1e-6)
    assert mechanism.snapshot()["ledger.releases"].tolist() == [4, 0, 0]
    assert build_mechanism(PrivacyOptions()).spending().left is None


@pytest.mark.parametrize("on_exhausted", ["without-estimator", "absent"])
def test_at_the_end_of_a_devices_budget_it_goes_on_without_estimator_or_stays_away(
    on_exhausted: str,
) -> None:
    ledger = PrivacyLedger()
    options = PrivacyOptions(
        epsilon=2.0, unit="device", planned_participations=3, on_exhausted=on_exhausted
    )  # type: ignore[arg-type]
    mechanism = build_mechanism(options, ledger)
    for round_ in range(3):
        assert mechanism.release(report(round_), order(round_)).local_gradient is not None
    spent = ledger.epsilon("device", 1e-5)
    assert spent == pytest.approx(2.0)
    if on_exhausted == "absent":
        with pytest.raises(BudgetSpentError, match="nothing was sent"):
            mechanism.release(report(3), order(3))
    else:
        sent = mechanism.release(report(3), order(3))
        assert (sent.local_gradient, sent.gradient_samples) == (None, 0)
        np.testing.assert_array_equal(sent.model, report().model)
    assert ledger.epsilon("device", 1e-5) == spent


def test_a_protected_model_is_clipped_and_noised_and_stops_with_its_budget() -> None:
    options = PrivacyOptions(
        epsilon=5.0, protect=("estimator", "model"), model_clip=0.1, planned_participations=2
    )
    ledger = PrivacyLedger()
    mechanism = build_mechanism(options, ledger)
    sent = mechanism.release(report(0), order(0))
    np.testing.assert_allclose(sent.model, 0.1 / math.sqrt(P), rtol=1e-5)
    assert np.linalg.norm(sent.model) <= 0.1 * (1 + 1e-5)
    mechanism.release(report(1), order(1, accepted=0))
    with pytest.raises(BudgetSpentError):
        mechanism.release(report(2), order(2, accepted=1))
    assert ledger.epsilon("sample", 1e-5) <= 5.0 * (1 + 1e-6)


def test_the_estimator_gives_way_to_a_protected_model() -> None:
    options = PrivacyOptions(
        epsilon=5.0, unit="device", protect=("estimator", "model"), planned_participations=2
    )
    mechanism = build_mechanism(options)
    mechanism.release(report(0), order(0))
    mechanism.release(replace(report(1), local_gradient=None, gradient_samples=0), order(1))
    sent = mechanism.release(report(2), order(2))
    assert sent.local_gradient is None, "of four releases one was left, which went to the model"
    with pytest.raises(BudgetSpentError):
        mechanism.release(report(3), order(3))


def test_a_report_of_no_data_costs_nothing() -> None:
    journal = Journal()
    empty = replace(report(weight=0.0), local_gradient=None, gradient_samples=0)
    build_mechanism(
        PrivacyOptions(epsilon=1.0, protect=("estimator", "model")), journal=journal
    ).release(empty, order())
    assert journal.states == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["model", "local_gradient"])
def test_what_is_not_finite_stays_on_the_device(field: str, bad: float) -> None:
    journal = Journal()
    vector = np.zeros(P, np.float32)
    vector[7] = bad
    spoiled = (
        replace(report(), model=vector)
        if field == "model"
        else replace(report(), local_gradient=vector)
    )
    for options in (PrivacyOptions(epsilon=1.0), PrivacyOptions()):
        with pytest.raises(RejectedError, match="not finite"):
            build_mechanism(options, journal=journal).release(spoiled, order())
    assert journal.states == []


def test_an_estimator_that_was_not_clipped_is_refused() -> None:
    long = replace(report(), local_gradient=np.full(P, 1.0, np.float32))
    with pytest.raises(RejectedError, match="unclipped local gradient"):
        build_mechanism(PrivacyOptions(epsilon=1.0)).release(long, order())


@pytest.mark.parametrize("unit", ["sample", "device"])
def test_a_protected_profile_is_noised_once_and_then_repeated(
    unit: Literal["sample", "device"],
) -> None:
    options = PrivacyOptions(
        epsilon=3.0, unit=unit, protect=("profile", "model"), profile_bound=10.0
    )
    profile = Profile(5, np.array([3.0, 0.0, 4.0]))
    ledger = PrivacyLedger()
    mechanism = build_mechanism(options, ledger)
    sent = mechanism.release_profile(profile, window=20.0)
    sensitivity = math.sqrt(2) * (1 / 20 if unit == "sample" else 10)
    np.testing.assert_allclose(
        sent.velocity, profile.velocity + options.noise_multiplier() * sensitivity
    )
    restarted = build_mechanism(options)
    restarted.restore(mechanism.snapshot())
    for again in (mechanism, restarted):
        np.testing.assert_array_equal(
            again.release_profile(Profile(5, np.ones(3)), 20.0).velocity, sent.velocity
        )
    assert ledger.snapshot()["releases"][2] == 1
    mechanism.release(report(), order())
    with pytest.raises(BudgetSpentError, match="profile"):
        build_mechanism(options, ledger).release_profile(profile, window=20.0)


def test_noisy_velocities_are_never_negative() -> None:
    mechanism = DPMechanism(
        PrivacyOptions(epsilon=1.0, protect=("profile",)),
        PrivacyLedger(),
        Journal().commit,
        lambda n: -ones(n),
    )
    assert mechanism.release_profile(Profile(5, np.zeros(3)), window=1.0).velocity.min() == 0
