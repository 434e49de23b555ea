"""The measurements of every learner against a loop that backpropagates one sample at a time."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from fedkeep.core.protocols import FleetLearner
from fedkeep.core.types import AnyArray, Batch
from fedkeep.learn import torch_models as models
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.torch_learner import TorchLearner
from fedkeep.learn.torch_measurements import AutogradMeasurements, TorchMeasurements
from tests.golden.modules import har_dnn, logistic

RELATIVE = 1e-5
Factory = Callable[[], torch.nn.Module]


class Normed(torch.nn.Module):
    """LayerNorm, dropout and a weight used twice: not what closed forms can measure."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(12, 9)
        self.norm = torch.nn.LayerNorm(9)
        self.again = torch.nn.Linear(9, 9)
        self.dropout = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = self.again(torch.tanh(self.again(x)))
        return self.last(self.dropout(x))  # type: ignore[no-any-return]


class Strange(torch.nn.Module):
    """Strided, dilated and grouped convolutions, a linear layer on a sequence, missing biases."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 6, 2, dilation=2, bias=False),
            nn.Flatten(2),
        )
        self.along = nn.Linear(8, 5)
        self.down = nn.Conv1d(6, 3, 3, dilation=2, padding=2, stride=2)
        self.last = nn.Linear(9, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.along(self.body(x))))
        return torch.log_softmax(self.last(x.flatten(1)), dim=1)


NETWORKS: dict[str, tuple[Factory, tuple[int, ...], int]] = {
    "logistic": (lambda: logistic(7, 4), (7,), 4),
    "har-dnn": (lambda: har_dnn(30, 12, 5), (30,), 5),
    "lenet": (models.lenet, (1, 28, 28), 10),
    "traffic-cnn": (models.traffic_cnn, (3, 64), 20),
    "normed": (Normed, (12,), 4),
    "strange": (Strange, (2, 8, 7), 3),
}
CASES = [
    (name, last)
    for name, depth in [
        ("logistic", 1),
        ("har-dnn", 2),
        ("lenet", 4),
        ("traffic-cnn", 6),
        ("normed", 4),
        ("strange", 5),
    ]
    for last in (None, 1, 2, 3)
    if last is None or last < depth
]


def batch_of(shape: tuple[int, ...], classes: int, n: int = 6, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, classes, n), np.arange(n)
    )


def gradients_one_by_one(
    module: torch.nn.Module, batch: Batch
) -> tuple[AnyArray, list[list[AnyArray]]]:
    """The loss and the gradient by each parameter, for one sample after the other, in float64."""
    module = module.double().eval()
    losses, rows = [], []
    for x, y in zip(torch.from_numpy(batch.x).double(), torch.from_numpy(batch.y), strict=True):
        loss = torch.nn.functional.cross_entropy(module(x[None]), y[None])
        losses.append(loss.item())
        rows.append(
            [g.numpy().ravel() for g in torch.autograd.grad(loss, list(module.parameters()))]
        )
    return np.array(losses), rows


def with_model(factory: Factory, model: AnyArray) -> torch.nn.Module:
    module = factory()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(model.copy()), module.parameters())
    return module


def check_against_loop(
    learner: FleetLearner, factory: Factory, batch: Batch, head_parameters: int
) -> None:
    model = learner.initial(3)
    direction = np.random.default_rng(1).normal(size=learner.gradient_size).astype(np.float32)
    losses, rows = gradients_one_by_one(with_model(factory, model), batch)
    gradients = np.stack([np.concatenate(row) for row in rows])[:, -learner.gradient_size :]
    heads = np.stack([np.concatenate(row[-head_parameters:]) for row in rows])
    norms = np.linalg.norm(gradients, axis=1)

    seen = learner.probe(model).measure(batch)
    np.testing.assert_allclose(seen.losses(), losses, rtol=RELATIVE)
    np.testing.assert_allclose(seen.norms(), norms, rtol=RELATIVE)
    np.testing.assert_allclose(seen.head_norms(), np.linalg.norm(heads, axis=1), rtol=RELATIVE)
    scale = norms.max() * np.linalg.norm(direction)
    np.testing.assert_allclose(
        seen.projections(direction), gradients @ direction, atol=RELATIVE * scale
    )
    mean = gradients.mean(axis=0)
    np.testing.assert_allclose(seen.mean_gradient(), mean, atol=RELATIVE * np.abs(mean).max())
    for scores in (seen.losses(), seen.norms(), seen.head_norms(), seen.projections(direction)):
        assert scores.shape == (len(batch),)
        assert scores.dtype == np.float64
    assert seen.mean_gradient().dtype == np.float32
    assert seen.activations().shape[0] == len(batch)


@pytest.mark.parametrize("n", [6, 13])
@pytest.mark.parametrize(("name", "last_layers"), CASES)
def test_torch_equals_one_by_one_backprop(name: str, last_layers: int | None, n: int) -> None:
    factory, shape, classes = NETWORKS[name]
    learner = TorchLearner(factory, last_layers)
    check_against_loop(
        learner, factory, batch_of(shape, classes, n), head_parameters=1 if name == "strange" else 2
    )


@pytest.mark.parametrize("last_layers", [None, 1, 2])
@pytest.mark.parametrize("widths", [(7, 4), (30, 12, 5), (9, 8, 7, 3)])
def test_numpy_equals_one_by_one_backprop(widths: tuple[int, ...], last_layers: int | None) -> None:
    if last_layers is not None and last_layers >= len(widths):
        pytest.skip("the network has fewer layers")

    def factory() -> torch.nn.Module:
        layers: list[torch.nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])

    check_against_loop(
        DenseLearner(widths, last_layers), factory, batch_of(widths[:1], widths[-1]), 2
    )


@pytest.mark.parametrize("last_layers", [None, 1, 2, 3])
def test_autograd_measurements_agree_with_closed_forms(last_layers: int | None) -> None:
    learner = TorchLearner(models.lenet, last_layers)
    model, batch = learner.initial(0), batch_of((1, 28, 28), 10, n=13)
    direction = learner.initial(1)[-learner.gradient_size :]
    fast = learner.probe(model).measure(batch)
    slow = AutogradMeasurements(learner._network, model, batch)
    assert isinstance(fast, TorchMeasurements)
    np.testing.assert_allclose(fast.losses(), slow.losses(), rtol=RELATIVE)
    np.testing.assert_allclose(fast.norms(), slow.norms(), rtol=RELATIVE)
    np.testing.assert_allclose(fast.head_norms(), slow.head_norms(), rtol=RELATIVE)
    np.testing.assert_allclose(
        fast.projections(direction), slow.projections(direction), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(fast.mean_gradient(), slow.mean_gradient(), atol=1e-6)
    np.testing.assert_array_equal(fast.activations(), slow.activations())
