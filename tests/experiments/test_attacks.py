"""Attacks on uploaded estimators: they work without noise, and the promised noise stops them."""

import numpy as np
import pytest
from attacks import (
    LastLayer,
    MembershipAttack,
    advantage,
    invert_analytically,
    invert_by_matching,
    similarity,
)

from fedkeep.core.gradients import mean_gradient
from fedkeep.core.types import Batch, LocalTraining, Report, TrainOrder, Vector
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.privacy.accountant import PrivacyLedger
from fedkeep.privacy.mechanism import DPMechanism
from fedkeep.privacy.options import PrivacyOptions

pytest.importorskip("dp_accounting", reason="needs the privacy extra")

FEATURES, CLASSES = 64, 10
LEARNER = DenseLearner((FEATURES, CLASSES))
MODEL = LEARNER.initial(0)


def samples(n: int, seed: int = 0) -> Batch:
    """Sparse non-negative inputs, like images: each label has its own pattern."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(99).random((CLASSES, FEATURES)) ** 4
    y = rng.integers(0, CLASSES, n)
    x = (patterns[y] * rng.random((n, FEATURES)) + 0.3 * rng.random((n, FEATURES)) ** 6).clip(0, 1)
    return Batch(x.astype(np.float32), y, np.arange(n))


def uploaded(batch: Batch, epsilon: float | None, seed: int = 0) -> Vector:
    """The estimator that leaves a device which saw this batch."""
    options = PrivacyOptions(epsilon=epsilon)
    gradient = mean_gradient(LEARNER.probe(MODEL).measure(batch), options.clip if epsilon else None)
    order = TrainOrder(0, MODEL, None, LocalTraining(0.1, 1))
    noise = np.random.default_rng(seed).standard_normal
    report = Report(0, MODEL, 1.0, 1, 1, gradient, len(batch))
    sent = (
        DPMechanism(options, PrivacyLedger(), lambda _: None, noise)
        .release(report, order)
        .local_gradient
    )
    assert sent is not None
    return sent


def test_one_sample_is_read_off_its_gradient_exactly() -> None:
    batch = samples(1)
    guess = invert_analytically(LastLayer.of(uploaded(batch, None), CLASSES))
    np.testing.assert_allclose(guess, batch.x[0], atol=1e-4)


@pytest.mark.parametrize("epsilon", [8.0, 1.0])
def test_noise_hides_the_one_sample(epsilon: float) -> None:
    batch = samples(1)
    guesses = [
        invert_analytically(LastLayer.of(uploaded(batch, epsilon, s), CLASSES)) for s in range(20)
    ]
    recovered = [similarity(guess[None], batch.x.astype(np.float64))[0] for guess in guesses]
    assert np.mean(recovered) < 0.3


def test_matching_recovers_a_few_samples_without_noise_and_none_with_it() -> None:
    batch = samples(2, seed=3)
    layer = LastLayer.of(MODEL, CLASSES)
    start = np.full((2, FEATURES), 0.2)

    def recovered(epsilon: float | None) -> float:
        gradient = LastLayer.of(uploaded(batch, epsilon), CLASSES)
        return float(
            similarity(
                invert_by_matching(layer, gradient, batch.y, start), batch.x.astype(float)
            ).mean()
        )

    assert recovered(None) > 0.95
    assert recovered(8.0) < 0.5


@pytest.mark.parametrize(
    ("epsilon", "least", "most"), [(None, 0.9, 1.0), (8.0, 0.55, 0.85), (1.0, 0.4, 0.62)]
)
def test_membership_shows_without_noise_and_fades_with_it(
    epsilon: float | None, least: float, most: float
) -> None:
    options = PrivacyOptions(epsilon=epsilon)
    public, clip = samples(2000, seed=77), options.clip if epsilon else None
    measured = [LEARNER.probe(MODEL).measure(public.take(public.y == y)) for y in range(CLASSES)]
    typical = [mean_gradient(of_label, clip) for of_label in measured]
    members, others = [], []
    for seed in range(60):
        batch, strangers = samples(10, seed), samples(10, seed + 1000)
        upload, bound = uploaded(batch, epsilon, seed), np.inf if clip is None else clip
        attack = MembershipAttack(upload, batch.y, np.array(typical, dtype=np.float64), bound)
        members.append(attack.scores(LEARNER.probe(MODEL).measure(batch), batch.y))
        others.append(attack.scores(LEARNER.probe(MODEL).measure(strangers), strangers.y))
    assert least <= advantage(np.concatenate(members), np.concatenate(others)) <= most


def test_whether_it_was_the_one_sample_is_certain_without_noise() -> None:
    public = samples(2000, seed=77)
    typical = [
        LEARNER.probe(MODEL).measure(public.take(public.y == y)).mean_gradient()
        for y in range(CLASSES)
    ]
    members, others = [], []
    for seed in range(30):
        batch, strangers = samples(1, seed), samples(20, seed + 1000)
        attack = MembershipAttack(
            uploaded(batch, None), batch.y, np.array(typical, dtype=np.float64), np.inf
        )
        members.append(attack.scores(LEARNER.probe(MODEL).measure(batch), batch.y))
        others.append(attack.scores(LEARNER.probe(MODEL).measure(strangers), strangers.y))
    assert advantage(np.concatenate(members), np.concatenate(others)) == 1.0
