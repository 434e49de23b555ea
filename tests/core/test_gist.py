"""The gist: its formulas against hand numbers, and by Monte Carlo what it promises."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.estimators import Window
from fedkeep.core.factory import make_device
from fedkeep.core.gist import Gist, GistOptions, StoredGradients
from fedkeep.core.policies.draw import Draw
from fedkeep.core.policies.fifo import Fifo
from fedkeep.core.policies.high_loss import HighLoss
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.regions import LabelRegions
from fedkeep.core.shares import Shares
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


def stored(before: list[list[float]], after: list[list[float]], regions: list[int]) -> StoredGradients:
    n = len(before)
    return StoredGradients(np.full(n, 1 / n), np.array(regions), Fixed(before), Fixed(after))  # type: ignore[arg-type]


def window(gradients: list[list[float]], regions: list[int], count: int = 2) -> Window:
    seen = Window(2, count)
    seen.add(Fixed(gradients), np.array(regions))  # type: ignore[arg-type]
    return seen


def test_the_first_participation_by_hand() -> None:
    gist = Gist(GistOptions("local", matched=False), 2)
    seen = window([[3.0, 1.0]] * 6, [0] * 6)
    mending = gist.mend(
        stored([[0.0, 2.0], [4.0, 2.0]], [[0.0, 2.0], [2.0, 2.0]], [0, 0]), seen, np.array([1.0, 0.0]), None, moved=True
    )
    # a(old) = (2, 2), a(new) = (1, 2); covariance 2, variances 4 and 1; n = 6, k = 2
    rho = 2 / 2.5
    beta = rho * 6 / 8
    assert mending.likeness == pytest.approx(rho)
    assert mending.trust == pytest.approx(beta)
    assert mending.correction == pytest.approx([beta * 1.0, beta * -1.0])
    assert mending.gist == pytest.approx([1 + beta, 2 - beta])
    assert mending.worth == pytest.approx(2 / (1 - rho * beta))
    gist.keep(mending)
    again = gist.mend(
        stored([[1.0, 2.0]] * 2, [[1.0, 2.0]] * 2, [0, 0]), window([], []), np.array([1.0, 0.0]), None, moved=False
    )
    assert again.correction == pytest.approx(again.trust * np.array([beta, -beta]), abs=1e-6)


def test_a_window_of_one_label_speaks_for_that_label_only() -> None:
    gist = Gist(GistOptions("local"), 2)
    seen = window([[5.0, 0.0]] * 4, [0] * 4)
    held = stored([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [0, 1])
    mending = gist.mend(held, seen, np.array([0.5, 0.5]), None, moved=False)
    # z = a + s (g - a_q) = (0.5, 0.5) + 0.5 ((5, 0) - (1, 0)); 1/N = 0.25/1 + 0.25/4
    worth = 1 / (0.25 + 0.0625)
    beta = worth / (worth + 2)
    assert mending.trust == pytest.approx(beta)
    assert mending.correction == pytest.approx([beta * 2.0, 0.0])


def test_parts_of_regions_that_are_not_stored_go_to_all_that_are() -> None:
    held = StoredGradients(np.array([0.25, 0.75]), np.array([0, 2]), Fixed([[0.0]] * 2), Fixed([[0.0]] * 2))  # type: ignore[arg-type]
    assert held.spread(np.array([0.1, 0.2, 0.3])) == pytest.approx([0.1 + 0.2 * 0.25, 0.3 + 0.2 * 0.75])


def test_a_gist_follows_the_shares_of_the_labels() -> None:
    gist = Gist(GistOptions("local"), 2)
    each = [[1.0, 0.0], [0.0, 1.0]]
    seen = window([*each, *each], [0, 1, 0, 1])
    gist.keep(gist.mend(stored(each, each, [0, 1]), seen, np.array([0.5, 0.5]), None, moved=False))
    assert gist.worth == pytest.approx(6.0)  # N = 4, k = 2, beta = 4 / 6
    weights = np.array([0.8, 0.2])
    held = StoredGradients(weights, np.array([0, 1]), Fixed(each), Fixed(each))  # type: ignore[arg-type]
    mending = gist.mend(held, Window(2, 2), weights, None, moved=False)
    # m = (0.5, 0.5) + 0.3 (1, 0) - 0.3 (0, 1) = a: shares that have changed are no error of the store
    assert mending.correction == pytest.approx([0.0, 0.0], abs=1e-6)
    worth, k = 1 / (1 / 6 + 2 * 0.3**2), 1 / (0.8**2 + 0.2**2)
    assert mending.trust == pytest.approx(worth / (worth + k))


def test_the_fleets_gist_turns_steps_towards_it() -> None:
    gist = Gist(GistOptions("shared", kappa=0.25, matched=False), 2)
    held = stored([[1.0, 1.0]] * 2, [[1.0, 1.0]] * 2, [0, 0])
    seen = window([[1.0, 1.0]] * 3, [0] * 3)
    fleet = np.array([5.0, 1.0], dtype=np.float32)
    mending = gist.mend(held, seen, np.array([1.0, 0.0]), fleet, moved=False)
    # N = 3, k = 2: beta = 3 / 5, and 0.25 beta (5 - 1) = 0.6
    assert mending.correction == pytest.approx([0.6, 0.0])


@pytest.mark.parametrize(("fading", "turn"), [(0.0, 1.0), (1.0, 0.8), (4.0, 0.8**4)])
def test_the_turn_towards_the_fleet_fades_with_the_likeness(fading: float, turn: float) -> None:
    gist = Gist(GistOptions("shared", kappa=1.0, fading=fading, matched=False), 2)
    held = stored([[2.0, 0.0]], [[1.0, 0.0]], [0])  # rho = 2 / 2.5
    fleet = np.array([2.0, 5.0], dtype=np.float32)
    mending = gist.mend(held, window([[2.0, 0.0]], [0]), np.array([1.0, 0.0]), fleet, moved=True)
    trust = 0.8 * 1 / (1 + 1)  # N = 1, k = 1
    assert mending.correction == pytest.approx([0.0, 5.0 * trust * turn])


@pytest.mark.parametrize("bad", [{"kappa": 2}, {"fading": -1}, {"memory": 0}, {"block": 0}, {"last_layers": 0}])
def test_options_out_of_range_are_refused_by_name(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        GistOptions("local", **bad)  # type: ignore[arg-type]


def test_nothing_known_means_nothing_added() -> None:
    gist = Gist(GistOptions("shared"), 2)
    held = stored([[1.0, 1.0]] * 2, [[1.0, 1.0]] * 2, [0, 0])
    mending = gist.mend(held, Window(2, 2), np.zeros(2), np.ones(2, dtype=np.float32), moved=True)
    assert mending.correction is None
    gist.keep(mending)
    assert gist.vector() is None


def test_a_sample_too_large_to_measure_corrects_nothing() -> None:
    gist = Gist(GistOptions("local", matched=False), 2)
    held = stored([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [0, 0])
    mending = gist.mend(held, window([[3e38, 3e38]], [0]), np.array([1.0, 0.0]), None, moved=True)
    assert mending.correction is None
    gist.keep(mending)
    assert gist.worth == 0


def test_a_gist_counts_for_no_more_samples_than_its_memory() -> None:
    gist = Gist(GistOptions("local", matched=False, memory=10.0), 2)
    held = stored([[0.0, 2.0], [4.0, 2.0]], [[0.0, 2.0], [4.0, 2.0]], [0, 0])
    mending = gist.mend(held, window([[3.0, 1.0]] * 1000, [0] * 1000), np.array([1.0, 0.0]), None, moved=False)
    beta = 10 / (10 + 2)  # n = 10, not 1000
    assert mending.trust == pytest.approx(beta)
    assert mending.worth == pytest.approx(10.0), "k / (1 - rho beta) = 12 is cut as well"


@pytest.mark.parametrize(
    ("before", "after", "rho"),
    [
        ([[3.0, 4.0]], [[3.0, 4.0]], 1.0),
        ([[3.0, 4.0]], [[4.0, -3.0]], 0.0),
        ([[2.0, 0.0]], [[1.0, 0.0]], 2 / 2.5),
        ([[2.0, 0.0]], [[-1.0, 0.0]], 0.0),
        ([[0.0, 0.0]], [[0.0, 0.0]], 0.0),
        ([[1.0, 2.0]] * 2, [[3.0, 1.0]] * 2, 0.0),
    ],
)
def test_likeness_of_one_sample_of_nothing_and_of_samples_that_do_not_vary(
    before: list[list[float]], after: list[list[float]], rho: float
) -> None:
    """One sample has no variance: its gradients themselves are compared. What cannot be compared is not alike."""
    gist = Gist(GistOptions("local", matched=False), 2)
    held = stored(before, after, [0] * len(before))
    mending = gist.mend(held, window([[1.0, 1.0]] * 4, [0] * 4), np.array([1.0, 0.0]), None, moved=True)
    assert mending.likeness == pytest.approx(rho)
    assert mending.trust == pytest.approx(rho * 4 / (4 + len(before)))


def test_what_of_the_window_the_store_lacks_counts_with_the_store_itself() -> None:
    """Half the window is of a label that is not stored: z = a + s (g - a_q) with a_q = a / 2 + a_0 / 2 and a = a_0."""
    gist = Gist(GistOptions("local"), 2)
    held = stored([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], [0, 0])
    seen = window([[1.0, 0.0]] * 4 + [[0.0, 3.0]] * 4, [0] * 4 + [1] * 4)
    mending = gist.mend(held, seen, np.array([0.5, 0.5]), None, moved=False)
    # z = g = (0.5, 1.5), s = 1, q_miss = 1/2; 1/N = (1 (1 - 1/2) - 1/2)^2 / 2 + 2 (1/4) / 4 = 1/8
    beta = 8 / (8 + 2)
    assert mending.trust == pytest.approx(beta)
    assert mending.correction == pytest.approx([beta * -0.5, beta * 1.5])


def test_many_small_gradients_are_not_lost_beside_a_large_one() -> None:
    seen = Window(2, 1)
    seen.add(Fixed([[2.0**25, 0.0]]), np.array([0]))  # type: ignore[arg-type]
    for _ in range(8):
        seen.add(Fixed([[1.0, 1.0]]), np.array([0]))  # type: ignore[arg-type]
    assert seen.snapshot()["sum"].tolist() == [2.0**25 + 8, 8.0]


# -- by Monte Carlo, on real devices ------------------------------------------------------------------------------


def world(rng: np.random.Generator, n: int, first: int = 0, label: int | None = None) -> Batch:
    y = rng.integers(0, LABELS, n) if label is None else np.full(n, label)
    x = rng.standard_normal((n, 3)) + 1.5 * y[:, None] * [1, -1, 0]
    return Batch(x.astype(np.float32), y, np.arange(first, first + n))


def device_for(policy: SelectionPolicy, gist: GistOptions, seed: int) -> Device:
    device = make_device(
        LEARNER,
        policy,
        capacity=4,
        sample_shape=(3,),
        labels=LABELS,
        regions=LabelRegions(LABELS),
        after_use=AfterUse("renew"),
        weighting=Weighting(1.0),
        gist=gist,
        seed=seed,
    )
    device.install(MODELS[0], np.ones(LEARNER.size, dtype=np.float32))
    device.assign(Assignment(np.array([2, 2]), np.ones(2), 1.0))
    return device


MODELS = [LEARNER.initial(0), LEARNER.initial(0) + np.float32(0.02) * LEARNER.initial(1)]
WHOLE = world(np.random.default_rng(99), 40_000)


def true_gradient(model: Vector, label: int | None = None) -> FloatArray:
    batch = WHOLE if label is None else WHOLE.take(label == WHOLE.y)
    return LEARNER.probe(model).measure(batch).mean_gradient().astype(np.float64)


def steps(
    policy: Callable[[], SelectionPolicy], gist: GistOptions, streams: Callable[[int], Batch], n: int
) -> FloatArray:
    """The gradient of the first local step at the model the device had already, over many streams, (n, P)."""
    found = []
    for seed in range(n):
        device = device_for(policy(), gist, seed)
        device.observe(streams(seed), 1.0)
        prepared = device.prepare(TrainOrder(0, MODELS[0], None, LOCAL))
        own = LEARNER.probe(MODELS[0]).measure(prepared.job.batch)
        plain = own.weighted_gradient(prepared.job.weights / prepared.job.weights.mean())
        found.append(plain if prepared.job.correction is None else plain + prepared.job.correction)
    return np.array(found, dtype=np.float64)


@pytest.mark.parametrize("policy", [Fifo, Ode, HighLoss])
def test_with_full_trust_the_step_is_unbiased_whatever_is_stored(
    policy: type[SelectionPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredGradients, "effective_size", property(lambda _: 1e-9))  # then beta = rho = 1
    sure = GistOptions("local", matched=False, memory=1e12)

    def iid(seed: int) -> Batch:
        return world(np.random.default_rng(seed), 40)

    mended = steps(policy, sure, iid, 300)
    error = np.abs(mended.mean(axis=0) - true_gradient(MODELS[0]))
    assert (error <= 4 * mended.std(axis=0) / np.sqrt(300) + 1e-3).all()
    if policy is not Fifo:
        plain = steps(policy, GistOptions(), iid, 300).mean(axis=0) - true_gradient(MODELS[0])
        assert np.linalg.norm(plain) > 2 * np.linalg.norm(error)


def test_matched_the_bias_within_labels_vanishes_though_the_window_has_other_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StoredGradients, "effective_size", property(lambda _: 1e-9))

    def shifted(seed: int) -> Batch:
        """Mostly the one label or mostly the other, as often."""
        rng, first = np.random.default_rng(seed), 60 if seed % 2 else 20
        return Batch.concatenate([world(rng, first, 0, 0), world(rng, 80 - first, first, 1)])

    class Divided(HighLoss):
        balanced = True

    monkeypatch.setattr(Shares, "values", lambda _: np.array([0.5, 0.5]))
    sure = GistOptions("local", memory=1e12)
    truth = true_gradient(MODELS[0])
    matched, unmatched, plain = (
        steps(Divided, gist, shifted, 300) for gist in (sure, replace(sure, matched=False), GistOptions())
    )
    assert np.linalg.norm(matched.mean(axis=0) - truth) < 0.1 * np.linalg.norm(plain.mean(axis=0) - truth)
    assert np.square(matched - truth).sum(axis=1).mean() < 0.7 * np.square(unmatched - truth).sum(axis=1).mean()


def test_by_its_own_rule_the_variance_is_never_above_the_plain_stores() -> None:
    def stream(seed: int) -> Batch:
        return world(np.random.default_rng(seed), 40)

    mended = steps(Draw, GistOptions("local"), stream, 300)
    plain = steps(Draw, GistOptions(), stream, 300)
    assert mended.var(axis=0).sum() < 0.5 * plain.var(axis=0).sum()


# -- as part of a device ------------------------------------------------------------------------------------------


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
    whole, parts = played(device_for(Draw(), gist, 1), 1), played(device_for(Draw(), gist, 1), 7)
    np.testing.assert_allclose(whole, parts, atol=1e-6)
    first, second = device_for(Draw(), gist, 1), device_for(Draw(), gist, 1)
    played(first, 1, rounds=3)
    second.restore(first.snapshot())
    batch = world(np.random.default_rng(3), 30, 90)
    reports = []
    for device in (first, second):
        device.observe(batch, 3.0)
        reports.append(device.participate(TrainOrder(3, MODELS[1], None, LOCAL, 2)))
    np.testing.assert_array_equal(reports[0].model, reports[1].model)


def test_an_empty_store_forgets_the_gist() -> None:
    device = device_for(Draw(), GistOptions("local"), 1)
    played(device, 1, rounds=1)
    assert device.gist is not None
    assert device.gist.worth > 0
    device.store.revalue(np.full(4, -np.inf))
    device.participate(TrainOrder(1, MODELS[1], None, LOCAL))
    assert device.gist.worth == 0


@pytest.mark.parametrize(("name", "told"), [("none", False), ("local", False), ("shared", True)])
def test_a_local_gist_tells_nothing_that_federated_averaging_does_not(name: str, told: bool) -> None:
    device = device_for(Draw(), GistOptions(name), 1)  # type: ignore[arg-type]
    device.observe(world(np.random.default_rng(0), 30), 0.0)
    report = device.participate(TrainOrder(0, MODELS[1], None, LOCAL))
    assert (report.local_gradient is not None) == told
    assert (report.gradient_samples > 0) == told


def test_matching_needs_weights_by_client_and_label() -> None:
    with pytest.raises(ConfigError, match="client_label"):
        make_device(
            LEARNER, Ode(), capacity=4, sample_shape=(3,), labels=2, weighting=Weighting(0.0), gist=GistOptions("local")
        )


def test_a_told_gist_is_no_longer_than_the_clip() -> None:
    device = make_device(
        LEARNER, Draw(), capacity=4, sample_shape=(3,), labels=2, gist=GistOptions("shared"), clip=1e-3, seed=1
    )
    device.install(MODELS[0])
    device.observe(world(np.random.default_rng(0), 30), 0.0)
    report = device.participate(TrainOrder(0, MODELS[1], None, LOCAL))
    assert report.local_gradient is not None
    assert np.linalg.norm(report.local_gradient) == pytest.approx(1e-3, rel=1e-5)


def test_a_local_gist_never_mixes_clipped_and_unclipped_gradients() -> None:
    """What is told of arrivals is clipped; gist and store are not, so that one can be taken from the other."""
    mendings = []
    for clip in (None, 1e-3):
        device = make_device(
            LEARNER, Ode(), capacity=4, sample_shape=(3,), labels=2, weighting=Weighting(1.0),
            gist=GistOptions("local"), clip=clip, seed=1,
        )  # fmt: skip
        device.install(MODELS[0])
        device.observe(world(np.random.default_rng(0), 30), 0.0)
        prepared = device.prepare(TrainOrder(0, MODELS[1], None, LOCAL))
        mendings.append(prepared.mending)
        assert prepared.local_gradient is not None
        assert (np.linalg.norm(prepared.local_gradient) <= 1.001e-3) == (clip is not None)
    plain, clipped = mendings
    assert plain is not None
    assert clipped is not None
    np.testing.assert_array_equal(plain.correction, clipped.correction)
    assert np.linalg.norm(plain.correction) > 1e-2


@pytest.mark.parametrize("name", ["local", "shared"])
def test_before_there_is_a_model_nothing_is_known_added_or_told(name: str) -> None:
    gist = GistOptions(name)  # type: ignore[arg-type]
    device = make_device(LEARNER, Draw(), capacity=4, sample_shape=(3,), labels=2, gist=gist)
    device.observe(world(np.random.default_rng(0), 30), 0.0)
    order = TrainOrder(0, MODELS[0], np.ones(LEARNER.size, dtype=np.float32), LOCAL)
    assert device.prepare(order).job.correction is None
    assert device.participate(order).local_gradient is None


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_a_lossy_gist_survives_a_restart_to_the_bit_and_rounds_by_its_seed(encoding: str) -> None:
    options = GistOptions("local", encoding=encoding)  # type: ignore[arg-type]
    first, second = device_for(Draw(), options, 1), device_for(Draw(), options, 1)
    played(first, 1, rounds=2)
    second.restore(first.snapshot())
    models = [played_on(device) for device in (first, second)]
    np.testing.assert_array_equal(*models)
    assert first.gist is not None
    assert first.gist.nbytes < 4 * LEARNER.size


def played_on(device: Device) -> Vector:
    device.observe(world(np.random.default_rng(3), 30, 90), 3.0)
    return device.participate(TrainOrder(3, MODELS[1], None, LOCAL, 2)).model
