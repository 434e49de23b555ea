"""What a sketched gist reveals: its own exact length is clipped, noised, and rounded after that."""

from pathlib import Path

import numpy as np
import pytest

from fedkeep.agent.assembly import assemble, parse_config
from fedkeep.core.device import Device
from fedkeep.core.gist import GistOptions
from fedkeep.core.gradients.codec import PackedVector
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.types import Batch, FloatArray, LocalTraining, Report, TrainOrder, Vector
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.privacy.accountant import PrivacyLedger
from fedkeep.privacy.mechanism import DPMechanism
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.secagg.fixed_point import FixedPoint

pytest.importorskip("dp_accounting", reason="needs the privacy extra")

LEARNER = DenseLearner((30, 20, 2))
SKETCH = GistOptions("shared", rank=3, encoding="int8")
LAYOUT = SKETCH.layout(LEARNER)
CLIP = 0.25


def reported(seed: int, scale: float = 1.0, clip: float | None = CLIP) -> Report:
    """What a device sends after two participations on a stream of its own."""
    device = Device(
        LEARNER,
        BalancedReservoir(),
        capacity=4,
        sample_shape=(30,),
        labels=2,
        gist=SKETCH,
        clip=clip,
        seed=3,
    )
    device.set_model(LEARNER.initial(0))
    rng = np.random.default_rng(seed)
    for round_ in range(2):
        x = (scale * rng.standard_normal((20, 30))).astype(np.float32)
        batch = Batch(x, rng.integers(0, 2, 20), 100 * round_ + np.arange(20))
        device.observe(batch, float(round_))
        report = device.participate(order(round_))
    return report


def order(round_: int) -> TrainOrder:
    model = LEARNER.initial(0) + np.float32(0.01 * round_) * LEARNER.initial(1)
    return TrainOrder(round_, model, None, LocalTraining(0.1, 2))


def gradient_of(report: Report) -> Vector:
    assert report.local_gradient is not None
    return report.local_gradient


@pytest.mark.parametrize("scale", [0.01, 1.0, 1e4])
def test_whatever_a_device_sees_its_sketch_moves_by_at_most_two_clips(scale: float) -> None:
    assert not LAYOUT.whole
    sent = [gradient_of(reported(seed, scale)).astype(np.float64) for seed in range(4)]
    for mine in sent:
        # The whole vector of Y, Z and biases, by its own length: no estimate of the gradient's.
        assert np.linalg.norm(mine) <= CLIP * (1 + 1e-6)
        for yours in sent:
            assert np.linalg.norm(mine - yours) <= 2 * CLIP * (1 + 1e-6)


def test_noise_is_drawn_for_the_numbers_of_the_sketch_and_rounding_comes_after() -> None:
    options = PrivacyOptions(epsilon=8.0, unit="device", clip=CLIP, planned_participations=3)
    drawn: list[FloatArray] = []

    def recorded(size: int) -> FloatArray:
        drawn.append(np.random.default_rng(len(drawn)).standard_normal(size))
        return drawn[-1]

    report, asked = reported(0), order(1)
    plain = DPMechanism(options, PrivacyLedger(), lambda _: None, recorded)
    rounded = DPMechanism(options, PrivacyLedger(), lambda _: None, recorded, "int8")
    noisy = gradient_of(plain.release(report, asked))
    drawn.clear()
    released = rounded.release(report, asked)
    sent = gradient_of(released)
    assert [len(noise) for noise in drawn] == [LAYOUT.size]
    assert LAYOUT.size < LEARNER.size
    assert isinstance(sent, PackedVector)
    assert sent.packed is not None
    assert sent.packed["packed"].dtype == np.int8
    # Of the noisy numbers, each within a step of the block's scale.
    steps = np.repeat(sent.packed["scales"], 64)[: LAYOUT.size]
    assert (np.abs(np.asarray(sent) - noisy) <= steps * 1.001).all()
    # Sent again after a lost reply it is the same, and costs nothing.
    before = rounded.spending()
    again = gradient_of(rounded.release(report, asked))
    assert np.array_equal(again, sent)
    assert rounded.spending() == before


def test_sums_of_sketches_are_exact_on_a_common_grid() -> None:
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(LEARNER.size).astype(np.float32) for _ in range(7)]
    sketches = [LAYOUT.of_gradient(g) for g in gradients]
    grid = FixedPoint(bound=1e3, summands=7)
    words = [grid.encode(sketch) for sketch in sketches]
    total = np.sum(np.stack(words), axis=0, dtype=np.uint64)
    # Exact: what each device rounded to the grid, added without any further rounding.
    apart = np.sum([grid.decode(word) for word in words], axis=0)
    assert np.array_equal(grid.decode(total), apart)
    assert np.array_equal(
        grid.decode(np.sum(np.stack(words[::-1]), axis=0, dtype=np.uint64)), apart
    )
    # And the sketch of the sum, up to the float32 of the sketches themselves.
    whole = LAYOUT.of_gradient(np.sum(gradients, axis=0, dtype=np.float64).astype(np.float32))
    assert np.linalg.norm(apart - whole) <= 1e-5 * np.linalg.norm(whole)


@pytest.mark.parametrize("shorter", [{"rank": 3}, {"last_layers": 1}])
def test_an_agents_secure_sums_are_as_long_as_its_sketch(
    tmp_path: Path, shorter: dict[str, int]
) -> None:
    pytest.importorskip("Crypto", reason="needs the privacy extra")
    pytest.importorskip("cryptography", reason="needs the privacy extra")
    gist = {"mode": "shared", **shorter}
    table = {
        "samples": {"shape": [30], "labels": 2},
        "model": {"name": "mlp", "hidden": [20], "last_layers": 0},
        "policy": {"name": "balanced-reservoir"},
        "gist": gist,
        "privacy": {"secure_aggregation": True},
        "store": {"path": str(tmp_path / "s.store"), "budget": 400_000},
    }
    agent = assemble(parse_config(table))
    size = GistOptions("shared", **shorter).layout(LEARNER).size
    assert agent.device.exchange.size(agent.device.learner) == size < LEARNER.size
    sums = agent.release_pipeline.kept(under_way=False)["sums"].snapshot()
    assert sums["counted"].shape == (size + 1,)
    agent.store.file.disk.close()
