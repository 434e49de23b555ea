"""What holds of every learner: finite differences, chunks, frozen probes, rejected layers."""

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.protocols import FleetLearner, TrainingJob
from fedkeep.core.types import Batch, LocalTraining
from fedkeep.learn import torch_models
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.models import learner_for
from fedkeep.learn.torch_learner import TorchLearner
from fedkeep.learn.torch_measurements import AutogradMeasurements
from tests.golden.modules import har_dnn

TASKS: dict[str, tuple[tuple[int, ...], int]] = {
    "softmax": ((60,), 10),
    "mlp": ((900,), 5),
    "lenet": ((1, 28, 28), 10),
    "traffic-cnn": ((3, 64), 20),
}
QUANTITIES = ("losses", "norms", "head_norms", "mean_gradient", "activations")


def batch_of(shape: tuple[int, ...], classes: int, n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, classes, n), np.arange(n)
    )


class Centred(nn.Module):
    """Mixes the samples of a batch in a way that no list of layer types foresees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x - x.mean(0))  # type: ignore[no-any-return]


class SequenceFirst(nn.Module):
    """A linear layer that sees the samples along its second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.along(x.transpose(0, 1))).sum(0))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A GRU, which vmap cannot map over."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 6, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gru(x)[0][:, -1])  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """Attention, whose fused kernels cannot be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "learner", [DenseLearner((6, 5, 3)), TorchLearner(lambda: har_dnn(6, 5, 3))]
)
def test_projections_are_directional_derivatives(learner: FleetLearner) -> None:
    model, batch = learner.initial(0), batch_of((6,), 3, 8)
    direction = np.random.default_rng(1).normal(size=model.size).astype(np.float32)
    epsilon = np.float32(2e-4)
    ahead = learner.probe(model + epsilon * direction).measure(batch).losses()
    behind = learner.probe(model - epsilon * direction).measure(batch).losses()
    projections = learner.probe(model).measure(batch).projections(direction)
    np.testing.assert_allclose(projections, (ahead - behind) / (2 * epsilon), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("last_layers", [None, 1, 2])
@pytest.mark.parametrize(
    "factory",
    [
        torch_models.lenet,
        lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(784), har_dnn(784, 9, 10)),
    ],
)
def test_chunks_do_not_matter(factory: Callable[[], nn.Module], last_layers: int | None) -> None:
    whole, cut = TorchLearner(factory, last_layers), TorchLearner(factory, last_layers, chunk=3)
    model, batch = whole.initial(0), batch_of((1, 28, 28), 10, 8)
    direction = whole.initial(1)[-whole.gradient_size :]
    one, other = whole.probe(model).measure(batch), cut.probe(model).measure(batch)
    for quantity in QUANTITIES:
        np.testing.assert_allclose(
            getattr(one, quantity)(), getattr(other, quantity)(), rtol=1e-4, atol=1e-6
        )
    np.testing.assert_allclose(
        one.projections(direction), other.projections(direction), rtol=1e-4, atol=1e-5
    )


def test_what_does_not_fit_in_memory_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = TorchLearner(torch_models.lenet, chunk=3)
    model, batch = learner.initial(0), batch_of((1, 28, 28), 10, 8)
    kept = learner.probe(model).measure(batch)
    monkeypatch.setattr("fedkeep.learn.backends.KEPT_BYTES", 0)
    forgotten = learner.probe(model).measure(batch)
    for quantity in ("mean_gradient", "norms", "losses"):
        np.testing.assert_array_equal(getattr(kept, quantity)(), getattr(forgotten, quantity)())


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_a_probe_is_frozen(name: str) -> None:
    learner, batch = learner_for(name, *TASKS[name]), batch_of(*TASKS[name], 4)
    model = learner.initial(0)
    probe = learner.probe(model)
    before = probe.measure(batch).losses()
    model += 1.0
    learner.train(model, TrainingJob(batch, np.ones(4), 0), LocalTraining(0.1, 1))
    learner.logits(model, batch.x)
    np.testing.assert_array_equal(probe.measure(batch).losses(), before)


@pytest.mark.parametrize("learner", [DenseLearner((6, 5, 3)), TorchLearner(torch_models.lenet)])
def test_the_same_seed_gives_the_same_model(learner: FleetLearner) -> None:
    np.testing.assert_array_equal(learner.initial(4), learner.initial(4))
    assert not np.array_equal(learner.initial(4), learner.initial(5))
    assert learner.initial(4).shape == (learner.size,)


def test_dropout_acts_in_training_only_and_by_the_seed() -> None:
    learner = TorchLearner(
        lambda: nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    )
    model, batch = learner.initial(0), batch_of((6,), 3, 5)
    probe, local = learner.probe(model), LocalTraining(0.1, 2)
    np.testing.assert_array_equal(probe.measure(batch).losses(), probe.measure(batch).losses())
    trained = [
        learner.train(model, TrainingJob(batch, np.ones(5), seed), local) for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(trained[0], trained[1])
    assert not np.array_equal(trained[0], trained[2])


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True)]
)
def test_layers_that_couple_samples_are_refused(layer: nn.Module) -> None:
    with pytest.raises(FedkeepError, match="mixes the samples of a batch"):
        TorchLearner(lambda: nn.Sequential(layer, nn.Linear(6, 3)))


def test_unforeseen_coupling_is_found_out() -> None:
    learner = TorchLearner(Centred)
    with pytest.raises(FedkeepError, match="depends on the other samples"):
        learner.probe(learner.initial(0)).measure(batch_of((6,), 3, 4))


@pytest.mark.parametrize("factory", [SequenceFirst, Recurrent, Attentive])
def test_what_closed_forms_would_get_wrong_goes_through_autograd(
    factory: Callable[[], nn.Module],
) -> None:
    learner = TorchLearner(factory)
    model, batch = learner.initial(0), batch_of((7, 4), 3, 5)
    direction = learner.initial(1)
    seen = learner.probe(model).measure(batch)
    assert isinstance(seen, AutogradMeasurements)
    alone = [
        learner.probe(model).measure(batch.take(slice(i, i + 1))).mean_gradient() for i in range(5)
    ]
    np.testing.assert_allclose(
        seen.projections(direction), np.stack(alone) @ direction, rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(seen.norms(), np.linalg.norm(alone, axis=1), rtol=1e-4)


class Shifted(nn.Module):
    """A last layer whose output is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(x.sum(1))
        logits += 1.0
        return logits


class Ending(nn.Module):
    """A last layer that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x)[0][:, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("factory", "width"), [(Shifted, 4), (Ending, 28)])
def test_activations_are_those_of_any_last_layer(
    factory: Callable[[], nn.Module], width: int
) -> None:
    learner = TorchLearner(factory)
    seen = learner.probe(learner.initial(0)).measure(batch_of((7, 4), 3, 5))
    assert isinstance(seen, AutogradMeasurements)
    assert seen.activations().shape == (5, width)


@pytest.mark.parametrize("name", TASKS)
def test_logits_fit_losses_and_activations(name: str) -> None:
    shape, classes = TASKS[name]
    learner = learner_for(name, shape, classes, last_layers=1)
    model, batch = learner.initial(0), batch_of(shape, classes, 6)
    logits = learner.logits(model, batch.x)
    assert logits.shape == (6, classes)
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(6), batch.y]
    seen = learner.probe(model).measure(batch)
    np.testing.assert_allclose(seen.losses(), expected, rtol=1e-5)
    head = model[-learner.gradient_size :]
    weight, bias = head[:-classes].reshape(classes, -1), head[-classes:]
    np.testing.assert_allclose(seen.activations() @ weight.T + bias, logits, rtol=1e-4, atol=1e-5)


def test_read_only_samples_are_welcome() -> None:
    learner = learner_for("lenet", (1, 28, 28), 10)
    batch = batch_of((1, 28, 28), 10, 3)
    batch.x.flags.writeable = False
    assert learner.probe(learner.initial(0)).measure(batch).losses().shape == (3,)


def test_parameter_counts_are_the_papers() -> None:
    sizes = {name: learner_for(name, *task).size for name, task in TASKS.items()}
    lenet = 156 + 2416 + (256 * 84 + 84) + 850
    traffic = 320 + 3104 + 6208 + 12352 + (1024 * 128 + 128) + 2580
    assert sizes == {"softmax": 610, "mlp": 90100 + 505, "lenet": lenet, "traffic-cnn": traffic}


def test_unknown_names_and_options_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'lenett'.*lenet"):
        learner_for("lenett", (1, 28, 28), 10)
    with pytest.raises(ConfigError, match="has no option 'width'"):
        learner_for("mlp", (6,), 3, width=3)
    with pytest.raises(ConfigError, match="takes"):
        learner_for("lenet", (1, 28, 28), 10, width=3)
    with pytest.raises(ConfigError, match="last_layers must be between 1 and 4"):
        learner_for("lenet", (1, 28, 28), 10, last_layers=5)
    own = learner_for("fedkeep.learn.torch_models:lenet", (1, 28, 28), 3, classes=3)
    assert own.size == learner_for("lenet", (1, 28, 28), 3).size


@pytest.mark.parametrize("name", ["softmax", "lenet"])
def test_a_vector_of_another_model_is_refused(name: str) -> None:
    shape, classes = TASKS[name]
    with pytest.raises(FedkeepError, match="does not fit a model"):
        learner_for(name, shape, classes).logits(
            np.zeros(3, dtype=np.float32), np.zeros((1, *shape), dtype=np.float32)
        )
