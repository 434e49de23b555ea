"""The gist: its formulas against hand numbers, and by Monte Carlo what it promises."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.gist import (
    Correction,
    Gist,
    GistOptions,
    LinearEstimate,
    NoiseModel,
    StoredGradients,
    StoreSummary,
    best_linear_estimate,
    pooled_mean,
)
from fedkeep.core.gradients import GradientAccumulator
from fedkeep.core.gradients.layout import whole_layout
from fedkeep.core.participation import Participation
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.policies.fifo import Fifo
from fedkeep.core.policies.high_loss import HighLoss
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.regions import LabelRegions
from fedkeep.core.selection import LabelFrequencies
from fedkeep.core.store import AfterUse
from fedkeep.core.types import Assignment, Batch, FloatArray, LocalTraining, TrainOrder, Vector
from fedkeep.core.weighting import Weighting
from fedkeep.learn.dense_learner import DenseLearner

LEARNER = DenseLearner((3, 2))
LABELS = 2
LOCAL = LocalTraining(0.1, 1)


class Fixed:
    """Measurements of given gradients, (n, P)."""

    def __init__(self, gradients: list[list[float]]) -> None:
        self.gradients = np.array(gradients)

    def weighted_gradient(self, weights: FloatArray) -> Vector:
        mean: Vector = (weights @ self.gradients / len(weights)).astype(np.float32)
        return mean

    def mean_gradient(self) -> Vector:
        return self.weighted_gradient(np.ones(len(self.gradients)))

    def inner(self, other: "Fixed") -> FloatArray:
        products: FloatArray = (self.gradients * other.gradients).sum(axis=1)
        return products

    def norms(self) -> FloatArray:
        return np.sqrt(self.inner(self))


def stored(
    before: list[list[float]],
    after: list[list[float]],
    regions: list[int],
    *,
    fresh: bool = True,
    weights: list[float] | None = None,
) -> StoredGradients:
    n = len(before)
    shares, under = np.array(weights or [1 / n] * n), (Fixed(before), Fixed(after))
    return StoredGradients(shares, np.array(regions), np.full(n, fresh), *under)  # type: ignore[arg-type]


def window(gradients: list[list[float]], regions: list[int], count: int = 2) -> GradientAccumulator:
    seen = GradientAccumulator(2, count)
    seen.add(Fixed(gradients), np.array(regions))  # type: ignore[arg-type]
    return seen


def test_the_first_participation_by_hand() -> None:
    gist = Gist(GistOptions("local", label_matching=False), whole_layout(2), 2)
    seen = window([[3.0, 1.0]] * 6, [0] * 6)
    held = stored([[0.0, 2.0], [4.0, 2.0]], [[0.0, 2.0], [2.0, 2.0]], [0, 0])
    correction = gist.correct(
        held, seen, np.array([1.0, 0.0]), None, models=np.ones(2, dtype=np.float32)
    )
    # a(old) = (2, 2), a(new) = (1, 2); covariance 2, variances 4 and 1. Both stored samples are
    # among the six, so nothing speaks against taking all of the difference; half of what was off
    # is off under the new model.
    assert correction.rho == pytest.approx(2 / 2.5)
    assert correction.beta == pytest.approx(2 / 4)
    assert correction.vector == pytest.approx([0.5, -0.5])
    assert correction.gist == pytest.approx([1.5, 1.5])
    assert correction.ess == pytest.approx(6.0), (
        "of six samples, under either model: their noise is the same, halved"
    )
    gist.keep(correction)
    again = stored([[1.0, 2.0]] * 2, [[1.0, 2.0]] * 2, [0, 0], fresh=False)
    second = gist.correct(again, window([], []), np.array([1.0, 0.0]), None, models=None)
    assert second.beta == pytest.approx(1.0)
    assert second.vector == pytest.approx([0.5, -0.5], abs=1e-6)


def test_samples_that_the_gist_does_not_know_count_with_their_share() -> None:
    """Independent of the store, m counts as n / (n + k): the classic rule of a control variate."""
    gist = Gist(GistOptions("local", label_matching=False), whole_layout(2), 2)
    held = stored([[0.0, 2.0], [4.0, 2.0]], [[0.0, 2.0], [4.0, 2.0]], [0, 0], fresh=False)
    correction = gist.correct(
        held, window([[3.0, 1.0]] * 6, [0] * 6), np.array([1.0, 0.0]), None, models=None
    )
    assert correction.beta == pytest.approx(6 / (6 + 2))
    assert correction.ess == pytest.approx(6 + 2)


def test_a_window_of_one_label_counts_for_that_label_only() -> None:
    gist = Gist(GistOptions("local"), whole_layout(2), 2)
    seen = window([[5.0, 0.0]] * 4, [0] * 4)
    held = stored([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [0, 1], fresh=False)
    correction = gist.correct(held, seen, np.array([0.5, 0.5]), None, models=None)
    # The window has label 0 alone: its weight is 0.5 / (1 + 1.1 / 4), as the prior variance of
    # the labels' means is 10; the two stored samples supply the rest of the shares, over 1.1.
    seen_weight = 0.5 / (1 + 1.1 / 4)
    each = np.array([(0.5 - seen_weight) / 1.1, 0.5 / 1.1])
    m = np.array([5 * seen_weight + each[0], each[1]])
    assert correction.variance_term == pytest.approx(correction.beta * (m - 0.5), abs=1e-6)
    expected = 1 / (each @ each + seen_weight**2 / 4)
    assert correction.ess == pytest.approx(expected, rel=1e-6)


def test_a_label_that_does_not_come_is_not_forgotten() -> None:
    """Its stored sample was counted once; the same again, time after time, teaches nothing."""
    gist = Gist(GistOptions("local"), whole_layout(2), 2)
    each = [[1.0, 0.0], [0.0, 1.0]]
    both = window([[1.0, 0.0]] * 20 + [[0.0, 3.0]] * 20, [0] * 20 + [1] * 20)
    shares = np.array([0.5, 0.5])
    gist.keep(gist.correct(stored(each, each, [0, 1]), both, shares, None, models=None))
    for _ in range(20):
        seen = window([[1.0, 0.0]] * 20, [0] * 20)
        gist.keep(
            gist.correct(stored(each, each, [0, 1], fresh=False), seen, shares, None, models=None)
        )
    m = gist.vector()
    assert m is not None
    assert m == pytest.approx([0.5, 1.5], rel=0.1), "the store alone says 0.5 of label 1"


def test_a_gist_follows_the_shares_of_the_labels() -> None:
    gist = Gist(GistOptions("local"), whole_layout(2), 2)
    each = [[1.0, 0.0], [0.0, 1.0]]
    seen = window([*each, *each], [0, 1, 0, 1])
    gist.keep(
        gist.correct(stored(each, each, [0, 1]), seen, np.array([0.5, 0.5]), None, models=None)
    )
    # The window weighs 2 / 2.1, each stored sample (1/2 - 1/4.2) / 1.1 = 5/21.
    assert gist.ess == pytest.approx(1 / (2 * (5 / 21) ** 2 + (20 / 21) ** 2 / 8))
    held = stored(each, each, [0, 1], fresh=False, weights=[0.8, 0.2])
    correction = gist.correct(
        held, GradientAccumulator(2, 2), np.array([0.8, 0.2]), None, models=None
    )
    # Shares that were not followed would leave 0.3 of it; what remains is the prior's shrinkage.
    assert correction.vector == pytest.approx([0.0, 0.0], abs=0.06), (
        "other shares are no error of the store"
    )


def noise_of(
    mixture: LinearEstimate, past: NoiseModel | None, holding: StoreSummary, counts: FloatArray
) -> tuple[float, FloatArray]:
    """The variance of what a mixture gives, and its weight of each region, sample by sample."""
    n = max(1.0, counts.sum())
    known, seen, weights = mixture.past_weight, mixture.window_weight, mixture.sample_weights
    each = weights + np.where(holding.fresh, seen / n, 0.0)
    rest = seen**2 * (n - holding.fresh.sum()) / n**2
    composition = holding.by_region(weights, len(counts)) + seen * counts / n
    if past is not None:
        each = each + np.where(
            holding.fresh, 0.0, known * past.sample_coefficients[holding.regions]
        )
        gone = past.counts - holding.by_region((~holding.fresh).astype(np.float64), len(counts))
        rest += known**2 * (past.residual_variance + gone @ past.sample_coefficients**2)
        composition = composition + known * past.label_coefficients
    return float(each @ each + rest), composition


@given(data=st.data())
def test_no_other_mixture_of_the_same_is_better(data: st.DataObject) -> None:
    """Stated noise and composition are true, and another share of m or window has more error."""
    regions = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(np.array))
    fresh = data.draw(
        st.lists(st.booleans(), min_size=len(regions), max_size=len(regions)).map(np.array)
    )
    holding = StoreSummary(np.full(len(regions), 1 / len(regions)), regions, fresh)
    more = np.array(
        data.draw(st.lists(st.integers(0, 30), min_size=3, max_size=3)), dtype=np.float64
    )
    counts = holding.by_region(fresh.astype(np.float64), 3) + more
    shares = np.array([0.5, 0.3, 0.2])
    held_then = holding.by_region((~fresh).astype(np.float64), 3) + data.draw(st.integers(0, 2))
    past = data.draw(st.sampled_from([None, NoiseModel(shares, np.full(3, 0.05), held_then, 0.02)]))
    found = best_linear_estimate(past, holding, counts, shares)
    noise, composition = noise_of(found, past, holding, counts)
    best, most, weights = found.past_weight, found.window_weight, found.sample_weights
    noise_model = found.noise_model
    assert noise_model.label_coefficients == pytest.approx(composition)
    assert 1 / noise_model.ess == pytest.approx(noise, abs=1e-9)

    def taken(known: float, seen: float) -> LinearEstimate:
        """The same with other parts of m and window; the store supplies the rest by region."""
        before = np.zeros(3) if past is None else past.label_coefficients
        lacks = (best - known) * before + (most - seen) * counts / max(1.0, counts.sum())
        more = lacks / np.maximum(holding.by_region(None, 3), 1.0)
        return LinearEstimate(known, seen, weights + more[holding.regions], noise_model)

    def error(mixture: LinearEstimate) -> float:
        noise, composition = noise_of(mixture, past, holding, counts)
        return noise + 10.0 * float((shares - composition) @ (shares - composition))

    for known, seen in ((0.01, 0.0), (-0.01, 0.0), (0.0, 0.01), (0.0, -0.01)):
        if 0.01 < best < 0.99 and 0.01 < most < 0.99:
            assert error(found) <= error(taken(best + known, most + seen)) + 1e-9


@given(st.integers(0, 4), st.integers(0, 30), st.booleans())
def test_the_mean_of_windows_is_as_noisy_as_it_states(old: int, count: int, known: bool) -> None:
    fresh = np.array([False] * old + [True] * min(2, count) + [False] * (1 - min(1, old + count)))
    holding = StoreSummary(
        np.full(len(fresh), 1 / len(fresh)), np.zeros(len(fresh), dtype=np.int64), fresh
    )
    past = NoiseModel(np.ones(1), np.array([0.1]), np.array([5.0]), 0.05) if known else None
    if known or count:
        found = pooled_mean(past, holding, count)
        noise, composition = noise_of(found, past, holding, np.array([float(count)]))
        assert 1 / found.noise_model.ess == pytest.approx(noise)
        assert composition == pytest.approx([1.0])


def test_a_correction_counts_as_long_as_it_holds() -> None:
    own = np.array([1.0, -2.0], dtype=np.float32)
    correction = Correction(own, np.array([0.5, 0.5], dtype=np.float32), 0.8, 0.9, 1.0, own, None)
    assert correction.step_average(1.0, 5).vector == pytest.approx([1.5, -1.5])
    half = correction.step_average(
        0.5, 2
    )  # the second step needs half of it: three quarters in the mean
    assert half.vector == pytest.approx([0.75 + 0.5, -1.5 + 0.5]), (
        "what turns to the fleet does not fade"
    )
    assert half.beta == pytest.approx(0.6)
    assert correction.step_average(0.0, 5).variance_term == pytest.approx([0.2, -0.4]), (
        "of no use after the first step"
    )


def test_the_fleets_gist_turns_steps_towards_it() -> None:
    gist = Gist(GistOptions("shared", drift_weight=0.25, label_matching=False), whole_layout(2), 2)
    held = stored([[1.0, 1.0]] * 2, [[1.0, 1.0]] * 2, [0, 0], fresh=False)
    seen = window([[1.0, 1.0]] * 3, [0] * 3)
    fleet = np.array([5.0, 1.0], dtype=np.float32)
    correction = gist.correct(held, seen, np.array([1.0, 0.0]), fleet, models=None)
    assert correction.vector == pytest.approx([0.25 * correction.beta * (5 - 1), 0.0])
    assert correction.beta == pytest.approx(3 / (3 + 2))


def test_the_drift_term_fades_with_the_cube_of_the_gradient_correlation() -> None:
    gist = Gist(GistOptions("shared", drift_weight=1.0, label_matching=False), whole_layout(2), 2)
    held = stored([[2.0, 0.0]], [[1.0, 0.0]], [0], fresh=False)  # rho = 2 / 2.5, theta = 2 / 4
    fleet = np.array([2.0, 5.0], dtype=np.float32)
    correction = gist.correct(
        held,
        window([[2.0, 0.0]], [0]),
        np.array([1.0, 0.0]),
        fleet,
        models=np.ones(2, dtype=np.float32),
    )
    trust = 0.5 * 1 / (1 + 1)  # N = 1, k = 1
    assert correction.vector == pytest.approx([0.0, 5.0 * trust * 0.8**3])


@pytest.mark.parametrize("bad", [{"drift_weight": 2}, {"max_ess": 0}, {"last_layers": 0}])
def test_options_out_of_range_are_refused_by_name(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        GistOptions("local", **bad)  # type: ignore[arg-type]


def test_nothing_known_means_nothing_added() -> None:
    gist = Gist(GistOptions("shared"), whole_layout(2), 2)
    held = stored([[1.0, 1.0]] * 2, [[1.0, 1.0]] * 2, [0, 0])
    correction = gist.correct(
        held,
        GradientAccumulator(2, 2),
        np.zeros(2),
        np.ones(2, dtype=np.float32),
        models=np.ones(2, dtype=np.float32),
    )
    assert correction.vector is None
    gist.keep(correction)
    assert gist.vector() is None


def test_a_sample_too_large_to_measure_corrects_nothing() -> None:
    gist = Gist(GistOptions("local", label_matching=False), whole_layout(2), 2)
    held = stored([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [0, 0], fresh=False)
    correction = gist.correct(
        held,
        window([[3e38, 3e38]], [0]),
        np.array([1.0, 0.0]),
        None,
        models=np.ones(2, dtype=np.float32),
    )
    assert correction.vector is None
    gist.keep(correction)
    assert gist.ess == 0


def test_a_gist_counts_for_no_more_samples_than_its_memory() -> None:
    gist = Gist(GistOptions("local", label_matching=False, max_ess=10.0), whole_layout(2), 2)
    held = stored([[0.0, 2.0], [4.0, 2.0]], [[0.0, 2.0], [4.0, 2.0]], [0, 0], fresh=False)
    correction = gist.correct(
        held, window([[3.0, 1.0]] * 1000, [0] * 1000), np.array([1.0, 0.0]), None, models=None
    )
    assert correction.beta == pytest.approx(10 / (10 + 2)), "n = 10, not 1000"
    assert correction.ess == pytest.approx(10.0), (
        "the joint effective sample size, 12, is capped as well"
    )


@pytest.mark.parametrize(
    ("before", "after", "rho", "theta"),
    [
        ([[3.0, 4.0]], [[3.0, 4.0]], 1.0, 1.0),
        ([[3.0, 4.0]], [[4.0, -3.0]], 0.0, 0.0),
        ([[2.0, 0.0]], [[1.0, 0.0]], 2 / 2.5, 0.5),
        ([[2.0, 0.0]], [[-1.0, 0.0]], 0.0, 0.0),
        ([[0.0, 0.0]], [[0.0, 0.0]], 0.0, 0.0),
        ([[1.0, 2.0]] * 2, [[3.0, 1.0]] * 2, 0.0, 0.0),
    ],
)
def test_correlation_of_one_sample_of_nothing_and_of_samples_that_do_not_vary(
    before: list[list[float]], after: list[list[float]], rho: float, theta: float
) -> None:
    """One sample has no variance: its gradients are compared. If that fails, rho is 0."""
    gist = Gist(GistOptions("local", label_matching=False), whole_layout(2), 2)
    held = stored(before, after, [0] * len(before), fresh=False)
    correction = gist.correct(
        held,
        window([[1.0, 1.0]] * 4, [0] * 4),
        np.array([1.0, 0.0]),
        None,
        models=np.ones(2, dtype=np.float32),
    )
    assert correction.rho == pytest.approx(rho)
    assert correction.beta == pytest.approx(theta * 4 / (4 + len(before)))


def test_a_label_that_is_not_stored_is_known_from_the_window() -> None:
    gist = Gist(GistOptions("local"), whole_layout(2), 2)
    held = stored([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], [0, 0])
    seen = window([[1.0, 0.0]] * 4 + [[0.0, 3.0]] * 4, [0] * 4 + [1] * 4)
    correction = gist.correct(held, seen, np.array([0.5, 0.5]), None, models=None)
    assert correction.gist == pytest.approx([0.5, 1.5], rel=0.03)
    assert correction.beta > 0.9


def test_many_small_gradients_are_not_lost_beside_a_large_one() -> None:
    seen = GradientAccumulator(2, 1)
    seen.add(Fixed([[2.0**25, 0.0]]), np.array([0]))  # type: ignore[arg-type]
    for _ in range(8):
        seen.add(Fixed([[1.0, 1.0]]), np.array([0]))  # type: ignore[arg-type]
    assert seen.snapshot()["sum"].tolist() == [2.0**25 + 8, 8.0]


# -- by Monte Carlo, on real devices ---------------------------------------------------------


def world(rng: np.random.Generator, n: int, first: int = 0, label: int | None = None) -> Batch:
    y = rng.integers(0, LABELS, n) if label is None else np.full(n, label)
    x = rng.standard_normal((n, 3)) + 1.5 * y[:, None] * [1, -1, 0]
    return Batch(x.astype(np.float32), y, np.arange(first, first + n))


def device_for(policy: SelectionPolicy, gist: GistOptions, seed: int) -> Device:
    device = Device(
        LEARNER,
        policy,
        capacity=4,
        sample_shape=(3,),
        labels=LABELS,
        regions=LabelRegions(LABELS),
        after_use=AfterUse("evict_trained_first"),
        weighting=Weighting(1.0),
        gist=gist,
        seed=seed,
    )
    device.set_model(MODELS[0], np.ones(LEARNER.size, dtype=np.float32))
    device.apply_plan(Assignment(np.array([2, 2]), np.ones(2), 1.0))
    return device


MODELS = [LEARNER.initial(0), LEARNER.initial(0) + np.float32(0.02) * LEARNER.initial(1)]
WHOLE = world(np.random.default_rng(99), 40_000)


def true_gradient(model: Vector, label: int | None = None) -> FloatArray:
    batch = WHOLE if label is None else WHOLE.take(label == WHOLE.y)
    return LEARNER.probe(model).measure(batch).mean_gradient().astype(np.float64)


def steps(
    policy: Callable[[], SelectionPolicy],
    gist: GistOptions,
    streams: Callable[[int], Batch],
    n: int,
) -> FloatArray:
    """The gradient of the first local step at the device's present model, many streams, (n, P)."""
    found = []
    for seed in range(n):
        device = device_for(policy(), gist, seed)
        device.observe(streams(seed), 1.0)
        job = Participation(device, TrainOrder(0, MODELS[0], None, LOCAL)).prepare()
        own = LEARNER.probe(MODELS[0]).measure(job.batch)
        plain = own.weighted_gradient(job.weights / job.weights.mean())
        found.append(plain if job.correction is None else plain + job.correction)
    return np.array(found, dtype=np.float64)


@pytest.mark.parametrize("policy", [Fifo, Ode, HighLoss])
def test_with_full_trust_the_step_is_unbiased_whatever_is_stored(
    policy: type[SelectionPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoiseModel, "optimal_weight", lambda *_: 1.0)
    sure = GistOptions("local", label_matching=False, max_ess=1e12)

    def iid(seed: int) -> Batch:
        return world(np.random.default_rng(seed), 40)

    corrected = steps(policy, sure, iid, 300)
    error = np.abs(corrected.mean(axis=0) - true_gradient(MODELS[0]))
    assert (error <= 4 * corrected.std(axis=0) / np.sqrt(300) + 1e-3).all()
    if policy is not Fifo:
        plain = steps(policy, GistOptions(), iid, 300).mean(axis=0) - true_gradient(MODELS[0])
        assert np.linalg.norm(plain) > 2 * np.linalg.norm(error)


def test_matched_the_bias_within_labels_vanishes_though_the_window_has_other_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NoiseModel, "optimal_weight", lambda *_: 1.0)

    def shifted(seed: int) -> Batch:
        """Mostly the one label or mostly the other, as often."""
        rng, first = np.random.default_rng(seed), 60 if seed % 2 else 20
        return Batch.concatenate([world(rng, first, 0, 0), world(rng, 80 - first, first, 1)])

    class Divided(HighLoss):
        balanced = True

    monkeypatch.setattr(LabelFrequencies, "values", lambda _: np.array([0.5, 0.5]))
    sure = GistOptions("local", max_ess=1e12)
    truth = true_gradient(MODELS[0])
    matched, unmatched, plain = (
        steps(Divided, gist, shifted, 300)
        for gist in (sure, replace(sure, label_matching=False), GistOptions())
    )
    assert np.linalg.norm(matched.mean(axis=0) - truth) < 0.1 * np.linalg.norm(
        plain.mean(axis=0) - truth
    )
    assert (
        np.square(matched - truth).sum(axis=1).mean()
        < 0.7 * np.square(unmatched - truth).sum(axis=1).mean()
    )


def test_by_its_own_rule_the_variance_is_never_above_the_plain_stores() -> None:
    def stream(seed: int) -> Batch:
        return world(np.random.default_rng(seed), 40)

    corrected = steps(BalancedReservoir, GistOptions("local"), stream, 300)
    plain = steps(BalancedReservoir, GistOptions(), stream, 300)
    assert corrected.var(axis=0).sum() < 0.5 * plain.var(axis=0).sum()


# -- as part of a device ---------------------------------------------------------------------


def played(device: Device, cuts: int, rounds: int = 4) -> Vector:
    model = MODELS[0]
    for round_ in range(rounds):
        batch = world(np.random.default_rng(round_), 30, 30 * round_)
        for part in np.array_split(np.arange(30), cuts):
            device.observe(batch.take(part), float(round_))
        model = device.participate(TrainOrder(round_, model, None, LOCAL, round_ - 1)).model
    return model


@pytest.mark.parametrize("name", ["local", "shared"])
def test_chunking_and_restarts_change_nothing(name: str) -> None:
    gist = GistOptions(name)  # type: ignore[arg-type]
    whole, parts = (
        played(device_for(BalancedReservoir(), gist, 1), 1),
        played(device_for(BalancedReservoir(), gist, 1), 7),
    )
    np.testing.assert_allclose(whole, parts, atol=1e-6)
    first, second = (
        device_for(BalancedReservoir(), gist, 1),
        device_for(BalancedReservoir(), gist, 1),
    )
    played(first, 1, rounds=3)
    second.restore(first.snapshot())
    batch = world(np.random.default_rng(3), 30, 90)
    reports = []
    for device in (first, second):
        device.observe(batch, 3.0)
        reports.append(device.participate(TrainOrder(3, MODELS[1], None, LOCAL, 2)))
    np.testing.assert_array_equal(reports[0].model, reports[1].model)


def test_an_empty_store_forgets_the_gist() -> None:
    device = device_for(BalancedReservoir(), GistOptions("local"), 1)
    played(device, 1, rounds=1)
    assert device.gist is not None
    assert device.gist.ess > 0
    device.store.rescore(np.full(4, -np.inf))
    device.participate(TrainOrder(1, MODELS[1], None, LOCAL))
    assert device.gist.ess == 0


@pytest.mark.parametrize(
    ("name", "reported"), [("none", False), ("local", False), ("shared", True)]
)
def test_a_local_gist_tells_nothing_that_federated_averaging_does_not(
    name: str, reported: bool
) -> None:
    device = device_for(BalancedReservoir(), GistOptions(name), 1)  # type: ignore[arg-type]
    device.observe(world(np.random.default_rng(0), 30), 0.0)
    report = device.participate(TrainOrder(0, MODELS[1], None, LOCAL))
    assert (report.local_gradient is not None) == reported
    assert (report.gradient_samples > 0) == reported


def test_matching_needs_weights_by_client_and_label() -> None:
    with pytest.raises(ConfigError, match="client_label"):
        Device(
            LEARNER,
            Ode(),
            capacity=4,
            sample_shape=(3,),
            labels=2,
            weighting=Weighting(0.0),
            gist=GistOptions("local"),
        )


def test_a_reported_gist_is_no_longer_than_the_clip() -> None:
    device = Device(
        LEARNER,
        BalancedReservoir(),
        capacity=4,
        sample_shape=(3,),
        labels=2,
        gist=GistOptions("shared"),
        clip=1e-3,
        seed=1,
    )
    device.set_model(MODELS[0])
    device.observe(world(np.random.default_rng(0), 30), 0.0)
    report = device.participate(TrainOrder(0, MODELS[1], None, LOCAL))
    assert report.local_gradient is not None
    assert np.linalg.norm(report.local_gradient) == pytest.approx(1e-3, rel=1e-5)


def test_a_local_gist_never_mixes_clipped_and_unclipped_gradients() -> None:
    """What is reported of arrivals is clipped; gist and store are not, so they subtract."""
    corrections = []
    for clip in (None, 1e-3):
        device = Device(
            LEARNER,
            Ode(),
            capacity=4,
            sample_shape=(3,),
            labels=2,
            weighting=Weighting(1.0),
            gist=GistOptions("local"),
            clip=clip,
            seed=1,
        )
        device.set_model(MODELS[0])
        device.observe(world(np.random.default_rng(0), 30), 0.0)
        participation = Participation(device, TrainOrder(0, MODELS[1], None, LOCAL))
        participation.prepare()
        corrections.append(participation.correction)
        sent = participation.finish(participation.train()).local_gradient
        assert sent is not None
        assert (np.linalg.norm(sent) <= 1.001e-3) == (clip is not None)
    plain, clipped = corrections
    assert plain is not None
    assert clipped is not None
    np.testing.assert_array_equal(plain.vector, clipped.vector)
    assert np.linalg.norm(plain.vector) > 1e-2


@pytest.mark.parametrize("name", ["local", "shared"])
def test_before_there_is_a_model_nothing_is_known_added_or_reported(name: str) -> None:
    gist = GistOptions(name)  # type: ignore[arg-type]
    device = Device(
        LEARNER, BalancedReservoir(), capacity=4, sample_shape=(3,), labels=2, gist=gist
    )
    device.observe(world(np.random.default_rng(0), 30), 0.0)
    order = TrainOrder(0, MODELS[0], np.ones(LEARNER.size, dtype=np.float32), LOCAL)
    participation = Participation(device, order)
    assert participation.prepare().correction is None
    assert participation.finish(participation.train()).local_gradient is None


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_a_lossy_gist_survives_a_restart_to_the_bit_and_rounds_by_its_seed(encoding: str) -> None:
    options = GistOptions("local", encoding=encoding)  # type: ignore[arg-type]
    first, second = (
        device_for(BalancedReservoir(), options, 1),
        device_for(BalancedReservoir(), options, 1),
    )
    played(first, 1, rounds=2)
    second.restore(first.snapshot())
    models = [played_on(device) for device in (first, second)]
    np.testing.assert_array_equal(*models)
    assert first.gist is not None
    assert first.gist.nbytes < 4 * LEARNER.size


def played_on(device: Device) -> Vector:
    device.observe(world(np.random.default_rng(3), 30, 90), 3.0)
    return device.participate(TrainOrder(3, MODELS[1], None, LOCAL, 2)).model
