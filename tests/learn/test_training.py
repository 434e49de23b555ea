"""Weighted local SGD (Eq. 12) against a loop written by hand; many devices against single ones."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from fedkeep.core.protocols import FleetLearner, TrainingJob
from fedkeep.core.types import Batch, FloatArray, LocalTraining, Vector
from fedkeep.learn.dense_learner import DenseLearner

TorchCase = tuple[str, tuple[int, ...], int]
DENSE = [((6, 4), 4), ((6, 5, 3), 3)]
TORCH: list[TorchCase] = [
    ("logistic", (60,), 10),
    ("har_dnn", (900,), 5),
    ("lenet", (1, 28, 28), 10),
]


def torch_learner(name: str, last_layers: int | None = None) -> FleetLearner:
    pytest.importorskip("torch")
    from fedkeep.learn import torch_models
    from fedkeep.learn.torch_learner import TorchLearner
    from tests.golden import modules

    return TorchLearner(getattr(torch_models, name, None) or getattr(modules, name), last_layers)


def module_learner(kind: str) -> FleetLearner:
    """A module that is no chain of layers."""
    pytest.importorskip("torch")
    from torch import Tensor, nn

    from fedkeep.learn.torch_learner import TorchLearner

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.last = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.gru(x)[0][:, -1])  # type: ignore[no-any-return]

    def dropout() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    return TorchLearner(Recurrent if kind == "recurrent" else dropout)


def batch_of(shape: tuple[int, ...], classes: int, n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, classes, n), np.arange(n)
    )


def descend_by_hand(
    learner: FleetLearner, model: Vector, batch: Batch, gamma: FloatArray, local: LocalTraining
) -> Vector:
    """Full-batch Eq. 12 with the proximal term, from gradients of one sample at a time."""
    w = model.astype(np.float64)
    for _ in range(local.epochs):
        probe = learner.probe(w.astype(np.float32))
        rows = [
            probe.measure(batch.take(slice(i, i + 1))).mean_gradient() for i in range(len(batch))
        ]
        step = gamma @ np.stack(rows) / gamma.sum() + local.proximal * (w - model)
        w = w - local.learning_rate * step
    return w.astype(np.float32)


def check_against_hand(learner: FleetLearner, batch: Batch, proximal: float) -> None:
    local = LocalTraining(learning_rate=0.1, epochs=4, proximal=proximal)
    gamma = np.random.default_rng(2).uniform(0.1, 3.0, len(batch))
    model = learner.initial(0)
    before = model.copy()
    trained = learner.train(model, TrainingJob(batch, gamma, 0), local)
    np.testing.assert_allclose(
        trained, descend_by_hand(learner, model, batch, gamma, local), atol=2e-6
    )
    np.testing.assert_array_equal(model, before)
    assert trained.dtype == np.float32


@pytest.mark.parametrize("proximal", [0.0, 0.7])
@pytest.mark.parametrize(("widths", "classes"), DENSE)
def test_numpy_training_is_equation_12(
    widths: tuple[int, ...], classes: int, proximal: float
) -> None:
    check_against_hand(DenseLearner(widths), batch_of(widths[:1], classes, 7), proximal)


@pytest.mark.parametrize("proximal", [0.0, 0.7])
@pytest.mark.parametrize(("name", "shape", "classes"), TORCH)
def test_torch_training_is_equation_12(
    name: str, shape: tuple[int, ...], classes: int, proximal: float
) -> None:
    check_against_hand(torch_learner(name), batch_of(shape, classes, 5), proximal)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_chain_with_hooks_is_trained_with_what_they_do(layer: int) -> None:
    """Closed forms of layers know of no hooks: such a module is no chain of known layers."""
    pytest.importorskip("torch")
    from torch import nn

    from fedkeep.learn.torch_learner import TorchLearner

    def hooked() -> nn.Module:
        module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        module[layer].register_forward_hook(lambda _, __, output: 2 * output)
        return module

    check_against_hand(TorchLearner(hooked), batch_of((6,), 3, 5), 0.0)


def test_a_large_store_trains_in_passes_as_in_one() -> None:
    """300 samples do not go through the network at once; the step is the same."""
    learner = torch_learner("lenet")
    batch, model, local = (
        batch_of((1, 28, 28), 10, 300),
        learner.initial(0),
        LocalTraining(learning_rate=0.1, epochs=1),
    )
    gamma = np.random.default_rng(2).uniform(0.1, 3.0, 300)
    gradient = learner.probe(model).measure(batch).weighted_gradient(gamma * 300 / gamma.sum())
    trained = learner.train(model, TrainingJob(batch, gamma, 0), local)
    np.testing.assert_allclose(trained, model - 0.1 * gradient, atol=1e-6)


def test_numpy_and_torch_train_alike_in_mini_batches() -> None:
    local = LocalTraining(learning_rate=0.05, epochs=3, batch_size=4, proximal=0.1)
    batch = batch_of((60,), 10, 11)
    gamma = np.random.default_rng(0).uniform(0.5, 2.0, 11)
    in_torch, in_numpy = torch_learner("logistic"), DenseLearner((60, 10))
    model = in_numpy.initial(1)
    trained = in_numpy.train(model, TrainingJob(batch, gamma, 5), local)
    np.testing.assert_allclose(
        in_torch.train(model, TrainingJob(batch, gamma, 5), local), trained, atol=1e-6
    )
    assert not np.allclose(
        in_numpy.train(model, TrainingJob(batch, gamma, 6), local), trained, atol=1e-6
    )


def test_a_device_needs_no_symbolic_mathematics() -> None:
    """torch loads sympy, half a second and 30 MB, for some ways to compute gradients."""
    pytest.importorskip("torch")
    program = (
        "import sys; import numpy as np; from fedkeep.core.protocols import TrainingJob\n"
        "from fedkeep.core.types import Batch, LocalTraining\n"
        "from fedkeep.learn.models import learner_for\n"
        "learner = learner_for('lenet', (1, 28, 28), 10); model = learner.initial(0)\n"
        "batch = Batch(np.ones((3, 1, 28, 28), dtype=np.float32), np.arange(3), np.arange(3))\n"
        "learner.probe(model).measure(batch).mean_gradient()\n"
        "learner.train(model, TrainingJob(batch, np.ones(3), 0), LocalTraining(0.1, 1))\n"
        "sys.exit('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_mini_batch_is_weighted_within_itself() -> None:
    """One sample a step: whatever its weight, it moves the model by its own gradient."""
    learner = DenseLearner((6, 4))
    local = LocalTraining(learning_rate=0.1, epochs=2, batch_size=1)
    batch, model = batch_of((6,), 4, 5), learner.initial(0)
    light = learner.train(model, TrainingJob(batch, np.full(5, 1e-3), 1), local)
    np.testing.assert_allclose(
        learner.train(model, TrainingJob(batch, np.full(5, 1e3), 1), local), light, rtol=1e-5
    )


LEARNERS: dict[str, tuple[Callable[[], FleetLearner], tuple[int, ...], int]] = {
    "softmax": (lambda: DenseLearner((6, 4)), (6,), 4),
    "dense": (lambda: DenseLearner((6, 5, 3)), (6,), 3),
    "dense-last": (lambda: DenseLearner((6, 5, 3), 1), (6,), 3),
    "lenet": (lambda: torch_learner("lenet"), (1, 28, 28), 10),
    "traffic": (lambda: torch_learner("traffic_cnn"), (3, 64), 20),
    "dropout": (lambda: module_learner("dropout"), (4, 6), 3),
    "recurrent": (lambda: module_learner("recurrent"), (4, 6), 3),
    "lenet-last": (lambda: torch_learner("lenet", 1), (1, 28, 28), 10),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_no_weight_or_no_data_leaves_the_model_alone(name: str) -> None:
    make, shape, classes = LEARNERS[name]
    learner, local = make(), LocalTraining(learning_rate=0.1, epochs=2)
    model = learner.initial(0)
    for n in (0, 3):
        batch = batch_of(shape, classes, n)
        np.testing.assert_array_equal(
            learner.train(model, TrainingJob(batch, np.zeros(n), 0), local), model
        )


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("sizes", [(3, 1, 4), (0, 5, 2), (1, 1, 1, 40)])
@pytest.mark.parametrize("name", LEARNERS)
def test_many_devices_train_as_they_would_alone(
    name: str, sizes: tuple[int, ...], batch_size: int | None
) -> None:
    make, shape, classes = LEARNERS[name]
    learner, local = (
        make(),
        LocalTraining(learning_rate=0.1, epochs=3, batch_size=batch_size, proximal=0.2),
    )
    model = learner.initial(0)
    batches = [batch_of(shape, classes, n, seed) for seed, n in enumerate(sizes)]
    weights = [np.random.default_rng(n).uniform(0.5, 2.0, n) for n in sizes]
    jobs = [
        TrainingJob(batch, gamma, seed)
        for seed, (batch, gamma) in enumerate(zip(batches, weights, strict=True))
    ]
    together = learner.train_many(model, jobs, local)
    for trained, job in zip(together, jobs, strict=True):
        np.testing.assert_allclose(trained, learner.train(model, job, local), atol=2e-6)


@pytest.mark.parametrize("sizes", [(3, 1, 4), (0, 5), (1, 1, 1, 40)])
@pytest.mark.parametrize("name", LEARNERS)
def test_many_devices_measure_as_they_would_alone(name: str, sizes: tuple[int, ...]) -> None:
    make, shape, classes = LEARNERS[name]
    learner = make()
    models = [learner.initial(seed) for seed in range(len(sizes))]
    batches = [batch_of(shape, classes, n, seed) for seed, n in enumerate(sizes)]
    direction = learner.initial(9)[-learner.gradient_size :]
    for model, batch, many in zip(
        models, batches, learner.measure_many(models, batches), strict=True
    ):
        one = learner.probe(model).measure(batch)
        for quantity in ("losses", "norms", "head_norms", "mean_gradient", "activations"):
            of_many, of_one = getattr(many, quantity)(), getattr(one, quantity)()
            assert of_many.shape == of_one.shape
            np.testing.assert_allclose(of_many, of_one, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            many.projections(direction), one.projections(direction), rtol=1e-4, atol=1e-5
        )
