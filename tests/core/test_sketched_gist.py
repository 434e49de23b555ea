"""A gist that is a sketch: exact arithmetic, the whole gist at full rank, no drift in few bits."""

from dataclasses import replace

import numpy as np
import pytest

from fedkeep.config.experiment import resolve
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.gist import GistOptions
from fedkeep.core.gradients import GradientAccumulator
from fedkeep.core.gradients.codec import Encoding, pack, unpack
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.policies.ode import Ode
from fedkeep.core.protocols import FleetLearner
from fedkeep.core.store import AfterUse
from fedkeep.core.types import Batch, LocalTraining, TrainOrder
from fedkeep.learn.models import learner_for

LABELS = 5
PARTICIPATIONS = 400
"""Of a real device; ten thousand of gist and window alone are further below."""


def device(learner: FleetLearner, gist: GistOptions, shape: tuple[int, ...]) -> Device:
    made = Device(
        learner,
        BalancedReservoir(),
        capacity=5,
        sample_shape=shape,
        labels=LABELS,
        after_use=AfterUse("evict_trained_first"),
        gist=gist,
    )
    made.set_model(learner.initial(0))
    return made


def batch(shape: tuple[int, ...], seed: int, n: int = 24) -> Batch:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, *shape), dtype=np.float32)
    return Batch(x, rng.integers(0, LABELS, n), 1000 * seed + np.arange(n))


@pytest.mark.parametrize(
    ("model", "shape", "options"),
    [("mlp", (60,), {"hidden": [40]}), ("lenet", (1, 28, 28), {})],
)
@pytest.mark.parametrize("mode", ["local", "shared"])
def test_the_sketch_of_a_gist_is_the_gist_of_sketches(
    model: str, shape: tuple[int, ...], options: dict[str, list[int]], mode: str
) -> None:
    learner = learner_for(model, shape, LABELS, **options)
    whole_options = GistOptions(mode)  # type: ignore[arg-type]
    whole = device(learner, whole_options, shape)
    sketched = device(learner, replace(whole_options, rank=4, encoding="float32"), shape)
    assert sketched.gist is not None
    assert whole.gist is not None
    layout = sketched.gist.layout
    assert sketched.gist.size < whole.gist.size / 2
    assert sketched.window.nbytes < whole.window.nbytes / 4
    for round_ in range(6):
        for one in (whole, sketched):
            one.observe(batch(shape, round_), float(round_))
        step = np.float32(0.02) * learner.initial(round_ + 1)
        fleet = learner.initial(50) if mode == "shared" else None
        for one, told in ((whole, fleet), (sketched, fleet)):
            direction = None if told is None else told
            if direction is not None and one is sketched:
                direction = layout.of_gradient(direction)
            order = TrainOrder(
                round_, learner.initial(0) + step, direction, LocalTraining(0.05, epochs=3), None
            )
            one.participate(order)
        exact, found = whole.gist.vector(), sketched.gist.vector()
        assert exact is not None
        assert found is not None
        expected = layout.of_gradient(exact)
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
        assert sketched.gist.ess == pytest.approx(whole.gist.ess)
        assert whole.gist.latest is not None
        assert sketched.gist.latest is not None
        assert sketched.gist.latest.rho == pytest.approx(whole.gist.latest.rho)


def test_at_full_rank_a_sketched_gist_is_the_whole_one() -> None:
    learner = learner_for("mlp", (60,), LABELS, hidden=[40])
    reports = []
    for rank in (None, 60):
        one = device(learner, GistOptions("local", rank=rank, encoding="float32"), (60,))
        for round_ in range(3):
            one.observe(batch((60,), round_), float(round_))
            order = TrainOrder(
                round_, learner.initial(round_), None, LocalTraining(0.05, epochs=3), None
            )
            report = one.participate(order)
        reports.append(report.model)
    assert np.array_equal(*reports)


def test_the_fleets_gist_is_not_kept_after_the_participation() -> None:
    learner = learner_for("mlp", (60,), LABELS, hidden=[40])
    one = device(learner, GistOptions("shared", rank=4), (60,))
    assert one.gist is not None
    one.observe(batch((60,), 0), 0.0)
    fleet = np.ones(one.gist.size, dtype=np.float32)
    one.participate(TrainOrder(0, learner.initial(1), fleet, LocalTraining(0.05, epochs=3), None))
    assert one.global_gradient is None
    assert one.gist.latest is not None
    assert one.gist.latest.drift_term is not None


def test_what_a_policy_scores_by_cannot_be_a_sketch() -> None:
    learner = learner_for("mlp", (60,), LABELS, hidden=[40])
    with pytest.raises(ConfigError, match=r"set gist\.mode = 'local'"):
        Device(
            learner,
            Ode(),
            capacity=5,
            sample_shape=(60,),
            labels=LABELS,
            gist=GistOptions("shared", rank=4, label_matching=False),
        )


@pytest.mark.parametrize(("encoding", "error"), [("int8", 0.03), ("int4", 0.4)])
def test_rounding_does_not_add_up_over_ten_thousand_participations(
    encoding: Encoding, error: float
) -> None:
    """m in few bits, from a window in 16, stays beside the same in float32."""
    learner = learner_for("mlp", (20,), LABELS, hidden=[12])
    probe = learner.probe(learner.initial(0))
    options = GistOptions("local", rank=1, encoding=encoding)
    layout = options.layout(learner)
    assert not layout.whole
    came = [batch((20,), seed, n=6) for seed in range(16)]
    measured = [probe.measure(arrivals) for arrivals in came]
    short, wide = (
        GradientAccumulator(layout.size, LABELS, layout=layout, encoding=kept)
        for kept in (options.window_encoding, "float32")
    )
    exact_means = []
    for gradients, arrivals in zip(measured, came, strict=True):
        wide.clear()
        wide.add(gradients, arrivals.y)
        exact_means.append(wide.mean(0.2))
    kept, exact = (np.zeros(layout.size, dtype=np.float32) for _ in range(2))
    errors = []
    for change in range(10_000):
        one = change % 16
        short.clear()
        short.add(measured[one], came[one].y)
        kept = unpack(pack(0.8 * kept + short.mean(0.2), encoding, change), layout.size)
        exact = np.float32(0.8) * exact + exact_means[one]
        errors.append(np.linalg.norm(kept - exact) / np.linalg.norm(exact))
    assert np.mean(errors[-1000:]) < error
    # No drift: the last thousand are no worse than the first.
    assert np.mean(errors[-1000:]) < 1.1 * np.mean(errors[100:1100])


def test_a_sketch_is_kept_in_eight_bits_unless_something_else_is_said() -> None:
    assert GistOptions("local", rank=4).used_encoding == "int8"
    assert GistOptions("local", rank=4, encoding="float32").used_encoding == "float32"
    assert GistOptions("local").used_encoding == "float32"
    digests = [
        resolve({"task": {"name": "demo"}, "gist": {"mode": "local", **gist}}).digest()
        for gist in ({"rank": 4}, {"rank": 4, "encoding": "int8"}, {}, {"encoding": "float32"})
    ]
    assert digests[0] == digests[1] != digests[2] == digests[3]


@pytest.mark.parametrize(
    ("model", "shape"), [("mlp", (900,)), ("traffic-cnn", (3, 64)), ("mlp", (525,))]
)
def test_m_and_window_take_a_twentieth_of_what_whole_gists_took(
    model: str, shape: tuple[int, ...]
) -> None:
    learner = learner_for(model, shape, LABELS)
    assert learner.gradient_size > 50_000
    one = device(learner, GistOptions("shared", rank="auto"), shape)
    assert one.gist is not None
    for round_ in range(2):
        one.observe(batch(shape, round_), float(round_))
        fleet = np.ones(one.gist.size, dtype=np.float32)
        one.participate(TrainOrder(round_, learner.initial(1), fleet, LocalTraining(0.01, 2), None))
    one.observe(batch(shape, 5), 5.0)
    parts = ("gist.", "window.", "direction")
    kept = sum(array.nbytes for key, array in one.snapshot().items() if key.startswith(parts))
    # m and G in float32, the window's sum in float64.
    assert kept < (4 + 4 + 8) * learner.gradient_size / 20


@pytest.mark.parametrize("mode", ["local", "shared"])
def test_a_correction_that_fades_is_made_again_only_where_it_turns(mode: str) -> None:
    learner = learner_for("mlp", (60,), LABELS, hidden=[40])
    one = device(learner, GistOptions(mode, rank=4), (60,))  # type: ignore[arg-type]
    assert one.gist is not None
    for round_ in range(3):
        one.observe(batch((60,), round_), float(round_))
        fleet = one.gist.layout.of_gradient(learner.initial(50)) if mode == "shared" else None
        model = learner.initial(0) + np.float32(0.02) * learner.initial(round_ + 1)
        one.participate(TrainOrder(round_, model, fleet, LocalTraining(0.05, epochs=1), None))
    correction = one.gist.latest
    assert correction is not None
    assert correction.vector is not None
    # Of the store's gradient alone in the local mode, and of the model's step as well in the other.
    assert len(correction.known) == (1 if mode == "local" else 2)
    half = correction.step_average(0.5, 2)
    assert half.vector is not None
    if mode == "local":
        assert np.array_equal(half.vector, correction.vector * np.float32(0.75))
    else:
        assert half.made is None
    terms = half.variance_term
    assert terms is not None
    expected = one.gist.layout.reconstruct_near(
        terms if half.drift_term is None else terms + half.drift_term, half.known
    )
    assert np.allclose(half.vector, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


def test_hundreds_of_participations_of_a_sketched_gist_do_not_drift() -> None:
    """The whole chain, with its rounding, stays where the same chain in float32 is."""
    learner = learner_for("mlp", (40,), LABELS, hidden=[20])
    exact: list[np.ndarray] = []
    apart: dict[str, list[float]] = {"int8": [], "int4": []}
    encodings: tuple[Encoding, ...] = ("float32", "int8", "int4")
    for encoding in encodings:
        one = device(learner, GistOptions("local", rank=2, encoding=encoding), (40,))
        assert one.gist is not None
        for round_ in range(PARTICIPATIONS):
            one.observe(batch((40,), round_ % 50, n=8), float(round_))
            model = learner.initial(0) + np.float32(0.01 * (round_ % 2)) * learner.initial(1)
            one.participate(TrainOrder(round_, model, None, LocalTraining(0.05, epochs=1), None))
            vector = one.gist.vector()
            assert vector is not None
            if encoding == "float32":
                exact.append(np.array(vector))
            else:
                truth = exact[round_]
                away = np.linalg.norm(vector - truth) / np.linalg.norm(truth)
                apart[encoding].append(float(away))
    for encoding, most in (("int8", 0.05), ("int4", 0.6)):
        early, late = (np.mean(part) for part in (apart[encoding][50:150], apart[encoding][-100:]))
        assert late < most
        assert late < 1.2 * early + 1e-3
