"""Numbers to predict: losses by hand, and every backend against autograd, one sample at a time."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedkeep.core.errors import ConfigError
from fedkeep.core.gradients.accumulator import GradientAccumulator, clip_weights
from fedkeep.core.protocols import FleetLearner, TrainingJob
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Vector
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.evaluation import judge, number_scores, predict
from fedkeep.learn.losses import CROSS_ENTROPY, NumberLoss, loss_of
from fedkeep.learn.models import learner_for
from fedkeep.learn.objective import Objective
from fedkeep.learn.torch_learner import TorchLearner
from fedkeep.learn.torch_measurements import AutogradMeasurements, TorchMeasurements
from fedkeep.testing import check_learner

SQUARED = NumberLoss("squared", centre=3.0, scale=2.0)
HUBER = NumberLoss("huber", delta=0.5, centre=3.0, scale=2.0)
LOSSES = [SQUARED, HUBER]


def chain(width: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, width))


class Gated(nn.Module):
    """No chain of layers, and no layer of closed form before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 4, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gru(x.view(-1, 3, 2))[0][:, -1])  # type: ignore[no-any-return]


def batch_of(n: int, width: int = 1, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    y = 3 + 4 * rng.normal(size=n if width == 1 else (n, width))
    return Batch(rng.normal(size=(n, 6)).astype(np.float32), y, np.arange(n))


def written_out(
    loss: NumberLoss, module: nn.Module, model: Vector, x: AnyArray, y: AnyArray
) -> tuple[float, AnyArray]:
    """One sample's loss and gradient by torch alone, from the definition."""
    torch.nn.utils.vector_to_parameters(torch.from_numpy(model), module.parameters())
    residual = module(torch.from_numpy(x)[None])[0] - torch.tensor((y - 3.0) / 2.0).float()
    if loss.name == "squared":
        found = (residual**2 / 2).mean()
    else:
        found = F.huber_loss(residual, torch.zeros_like(residual), delta=loss.delta)
    parts = torch.autograd.grad(found, list(module.parameters()))
    return float(found.detach()), np.concatenate([part.numpy().ravel() for part in parts])


def backends(loss: NumberLoss) -> dict[str, tuple[FleetLearner, nn.Module]]:
    def torch_learner(module: type[nn.Module] | None) -> FleetLearner:
        return TorchLearner(module or chain, objective=Objective(loss))

    return {
        "dense": (DenseLearner((6, 5, 1), loss=loss), chain()),
        "batched layers": (torch_learner(None), chain()),
        "autograd": (torch_learner(Gated), Gated()),
    }


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("backend", ["dense", "batched layers", "autograd"])
@pytest.mark.parametrize("n", [7, 40])
def test_every_backend_measures_as_autograd_does_one_by_one(
    backend: str, loss: NumberLoss, n: int
) -> None:
    learner, module = backends(loss)[backend]
    model, batch = learner.initial(3), batch_of(n)
    rows = [written_out(loss, module, model, batch.x[i], batch.y[i]) for i in range(n)]
    losses, gradients = np.array([r[0] for r in rows]), np.stack([r[1] for r in rows])
    direction = np.random.default_rng(1).normal(size=learner.size).astype(np.float32)
    weights = np.linspace(0, 2, n)
    for seen in (
        learner.probe(model).measure(batch),
        learner.measure_many([model, model], [batch_of(5, seed=9), batch])[1],
    ):
        np.testing.assert_allclose(seen.losses(), losses, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            seen.projections(direction), gradients @ direction, rtol=1e-3, atol=1e-4
        )
        np.testing.assert_allclose(
            seen.norms(), np.linalg.norm(gradients, axis=1), rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(
            seen.weighted_gradient(weights), weights @ gradients / n, rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_closed_forms_of_torch_layers_are_those_of_autograd(loss: NumberLoss) -> None:
    learner = TorchLearner(chain, objective=Objective(loss))
    batch = learner._network.objective.prepared(batch_of(9))
    model = learner.initial(1)
    closed = TorchMeasurements(learner._network, model, batch)
    alone = AutogradMeasurements(learner._network, model, batch)
    np.testing.assert_allclose(closed.losses(), alone.losses(), rtol=1e-5)
    np.testing.assert_allclose(closed.norms(), alone.norms(), rtol=1e-4)
    np.testing.assert_allclose(closed.mean_gradient(), alone.mean_gradient(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("backend", ["dense", "batched layers", "autograd"])
def test_training_is_weighted_gradient_descent(backend: str, loss: NumberLoss) -> None:
    learner, module = backends(loss)[backend]
    model, rate = learner.initial(5), 0.1
    jobs = [TrainingJob(batch_of(n, seed=n), np.linspace(0.5, 2, n), seed=0) for n in (4, 6, 30)]
    trained = learner.train_many(model, jobs, LocalTraining(rate, epochs=3))
    for job, found in zip(jobs, trained, strict=True):
        expected = model.copy()
        for _ in range(3):
            gradients = [
                written_out(loss, module, expected, x, y)[1]
                for x, y in zip(job.batch.x, job.batch.y, strict=True)
            ]
            share = job.weights / job.weights.sum()
            expected = (expected - rate * (share @ np.stack(gradients))).astype(np.float32)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_several_numbers_count_by_their_mean(loss: NumberLoss) -> None:
    dense = DenseLearner((6, 5, 3), loss=loss)
    layers = TorchLearner(lambda: chain(3), objective=Objective(loss, width=3))
    model, batch = dense.initial(2), batch_of(8, width=3)
    losses = [
        written_out(loss, chain(3), model, x, y)[0] for x, y in zip(batch.x, batch.y, strict=True)
    ]
    for learner in (dense, layers):
        seen = learner.probe(model).measure(batch)
        np.testing.assert_allclose(seen.losses(), losses, rtol=1e-4)
    np.testing.assert_allclose(
        dense.probe(model).measure(batch).norms(), layers.probe(model).measure(batch).norms(),
        rtol=1e-4,
    )  # fmt: skip
    nothing = Batch(
        np.empty((0, 6), dtype=np.float32), np.empty(0, dtype=np.int64), np.empty(0, int)
    )
    jobs = [TrainingJob(nothing, np.empty(0), 0), TrainingJob(batch, np.ones(8), 0)]
    for learner in (dense, layers):
        still, moved = learner.train_many(model, jobs, LocalTraining(0.1, epochs=1))
        assert np.array_equal(still, model)
        assert not np.array_equal(moved, model)


def test_losses_by_hand() -> None:
    loss = NumberLoss("huber", delta=2.0, centre=10.0, scale=4.0)
    outputs = np.array([[0.0], [1.0], [3.5], [-4.0]])
    y = loss.targets(np.array([10.0, 14.0, 14.0, 6.0]), 1)  # 0, 1, 1 and -1 from the centre
    assert y.ravel().tolist() == [0.0, 1.0, 1.0, -1.0]
    # residuals 0, 0, 2.5 and -3: 2 (2.5 - 1) and 2 (3 - 1)
    assert loss.losses(outputs, y).tolist() == [0.0, 0.0, 3.0, 4.0]
    assert loss.errors(outputs, y).ravel().tolist() == [0.0, 0.0, 2.0, -2.0]
    assert loss.predictions(outputs).ravel().tolist() == [10.0, 14.0, 24.0, -6.0]
    # at delta both branches meet, in value and in slope
    at = np.array([[2.0]])
    zero = np.zeros((1, 1), dtype=np.float32)
    assert (
        loss.losses(at, zero).tolist() == NumberLoss("squared").losses(at, zero).tolist() == [2.0]
    )


def test_scores_by_hand() -> None:
    y = np.array([0.0, 2.0, 4.0, 6.0])  # mean 3, variance 5
    scores = number_scores(np.array([1.0, 2.0, 4.0, 3.0]), y)  # off by 1, 0, 0, -3
    assert scores.mae == 1.0
    assert scores.rmse == pytest.approx(2.5**0.5)
    assert scores.r2 == pytest.approx(0.5)
    assert number_scores(np.full(4, 3.0), y).r2 == pytest.approx(0.0)
    assert number_scores(np.array([np.nan, 0, 0, np.inf]), y).r2 == -1.0
    assert number_scores(np.full(3, 7.0), np.full(3, 7.0)).r2 == 1.0
    assert number_scores(np.full(3, 8.0), np.full(3, 7.0)).r2 == -1.0


def test_a_loss_of_ones_own_is_measured_trained_and_judged() -> None:
    learner = learner_for(
        "tests.learn.test_number_losses:labels_net", (6,), 1, NumberTargets(width=3),
        loss="tests.learn.test_number_losses:MULTI_LABEL",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6)).astype(np.float32)
    y = (x[:, :3] > 0).astype(np.float64)
    batch, model = Batch(x, y, np.arange(40)), learner.initial(0)
    seen = learner.probe(model).measure(batch)
    module = labels_net()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(model), module.parameters())
    alone = F.binary_cross_entropy_with_logits(
        module(torch.from_numpy(x)), torch.from_numpy(y).float(), reduction="none"
    ).mean(1)
    np.testing.assert_allclose(seen.losses(), alone.detach().numpy(), rtol=1e-5)
    trained = learner.train(
        model, TrainingJob(batch, np.ones(40), 0), LocalTraining(1.0, epochs=60)
    )
    losses, predicted = predict(learner, trained, x, y)
    assert losses.mean() < 0.5 * seen.losses().mean()
    assert predicted.min() >= 0
    assert predicted.max() <= 1
    assert number_scores(predicted, y).r2 > 0.4
    small = learner.train(model, TrainingJob(batch, np.ones(40), 0), LocalTraining(1e-3, epochs=1))
    np.testing.assert_allclose((model - small) / 1e-3, seen.mean_gradient(), rtol=2e-2, atol=2e-4)


def labels_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3))


class MultiLabel:
    """Independent labels, each there or not."""

    predictions = staticmethod(torch.sigmoid)

    def __call__(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none")


MULTI_LABEL = MultiLabel()


def smoothed(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, y, reduction="none", label_smoothing=0.1)


def batch_mean(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, y)


def test_a_loss_of_ones_own_for_classes() -> None:
    learner = learner_for(
        "tests.learn.test_number_losses:labels_net", (6,), 3,
        loss="tests.learn.test_number_losses:smoothed",
    )  # fmt: skip
    x, y = batch_of(5).x, np.array([0, 1, 2, 0, 1])
    losses, right = judge(learner, learner.initial(0), x, y)
    assert losses.shape == right.shape == (5,)
    again = learner.probe(learner.initial(0)).measure(Batch(x, y, np.arange(5))).losses()
    np.testing.assert_allclose(losses, again, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "targets", "words"),
    [
        ("softmax", {"loss": "huber"}, None, 'set target = "number"'),
        ("softmax", {"delta": 1.0}, None, "model.delta is for numbers"),
        ("softmax", {"loss": "cross-entropy"}, NumberTargets(), "is for classes"),
        ("softmax", {"loss": "hinge"}, NumberTargets(), "one of squared, huber"),
        ("softmax", {"scale": 0}, NumberTargets(), "scale must be above 0"),
        ("softmax", {"scale": "big"}, NumberTargets(), "must be a number"),
        ("softmax", {"loss": "a:b"}, None, "goes with a torch model"),
        ("fedboost", {"loss": "huber"}, NumberTargets(), "mixes predictors of classes"),
        (
            "tests.learn.test_number_losses:labels_net",
            {"loss": "tests.learn.test_number_losses:batch_mean"}, None, "one number a sample",
        ),
        (
            "tests.learn.test_number_losses:labels_net",
            {"loss": "tests.learn.test_number_losses:MULTI_LABEL"}, None, "takes no such outputs",
        ),
        ("tests.learn.test_number_losses:labels_net", {}, NumberTargets(), "3 outputs"),
        (
            "tests.learn.test_number_losses:labels_net",
            {"loss": "tests.learn.test_number_losses:smoothed", "delta": 2.0}, None,
            "has its numbers in its function",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said_in_a_sentence(
    name: str, options: dict[str, object], targets: NumberTargets | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        learner_for(name, (6,), 3, targets, **options)


def test_the_default_loss_follows_the_targets() -> None:
    assert loss_of({}, None) is CROSS_ENTROPY
    assert loss_of({}, NumberTargets()) == NumberLoss("squared")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_an_exported_file_values_and_trains_its_head(loss: NumberLoss, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from fedkeep.learn.export import export
    from fedkeep.learn.onnx_learner import LAYOUT_KEY, OnnxLearner, _parsed

    path = tmp_path / "meter.onnx"
    torch.manual_seed(0)
    module = chain()
    assert export(lambda: module, (6,), None, path, loss) <= 1e-5
    assert json.loads(_parsed(path.read_bytes())[0][LAYOUT_KEY])["loss"]["name"] == loss.name
    learner = OnnxLearner(path)
    assert learner.loss == loss
    model, batch = learner.initial(0), batch_of(20)
    rows = [written_out(loss, chain(), model, batch.x[i], batch.y[i]) for i in range(20)]
    heads = np.stack([gradient[-6:] for _, gradient in rows])
    seen = learner.probe(model).measure(batch)
    direction = np.linspace(-1, 1, 6).astype(np.float32)
    np.testing.assert_allclose(seen.projections(direction), heads @ direction, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(seen.losses(), [own for own, _ in rows], rtol=1e-4)
    np.testing.assert_allclose(seen.mean_gradient(), heads.mean(0), rtol=1e-3, atol=1e-5)
    job = TrainingJob(batch, np.ones(20), 0)
    trained = learner.train(model, job, LocalTraining(0.1, epochs=1))
    np.testing.assert_allclose(trained[-6:], model[-6:] - 0.1 * heads.mean(0), rtol=1e-3, atol=1e-5)
    losses, predicted = predict(learner, trained, batch.x, batch.y)
    assert predicted.shape == (20,)
    assert losses.mean() < seen.losses().mean()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("backend", ["dense", "batched layers"])
def test_learners_of_numbers_pass_the_public_checks(backend: str, loss: NumberLoss) -> None:
    learner, _ = backends(loss)[backend]
    report = check_learner(learner, batch_of(9))
    assert {"losses", "finite-differences", "training", "train-many"} <= set(report.passed)
    assert not report.skipped


def test_a_clipped_device_sends_no_sample_beyond_its_bound() -> None:
    learner, clip = DenseLearner((6, 1), loss=SQUARED), 0.3
    batch = batch_of(40)
    batch.y[7] = 1e6  # one reading of a broken meter
    seen = learner.probe(learner.initial(0)).measure(batch)
    lengths = clip_weights(seen.norms(), clip) * seen.norms()
    assert lengths.max() <= clip * (1 + 1e-6)
    assert lengths[7] == pytest.approx(clip, rel=1e-5)
    gradients = GradientAccumulator(learner.gradient_size, 1, clip)
    gradients.add(seen, np.zeros(40, dtype=np.int64))
    assert np.linalg.norm(gradients.mean()) <= clip * (1 + 1e-5)
