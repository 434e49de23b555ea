"""The formulas by autograd in double precision, one sample at a time, and learners to compare."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedkeep.core.protocols import Learner, TrainingJob
from fedkeep.core.types import AnyArray, Batch, FloatArray, LocalTraining, Vector
from fedkeep.learn.backends import minibatches
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.torch_learner import TorchLearner
from fedkeep.learn.torch_models import lenet, traffic_cnn
from tests.golden.modules import Recurrent, har_dnn, normalised


@dataclass(frozen=True)
class Case:
    """A learner beside the module that it stands for."""

    learner: Callable[[Path], Learner]
    module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    labels: int
    frozen_body: bool = False
    """Whether it trains no more than what it values."""


def torch_case(
    module: Callable[[], nn.Module],
    shape: tuple[int, ...],
    labels: int,
    last_layers: int | None = None,
) -> Case:
    return Case(lambda _: TorchLearner(module, last_layers), module, shape, labels)


def small_convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))


def exported(folder: Path) -> Learner:
    from fedkeep.learn.export import export
    from fedkeep.learn.onnx_learner import OnnxLearner

    if not (folder / "small.onnx").exists():
        export(small_convolution, (2, 8), None, folder / "small.onnx")
    return OnnxLearner(folder / "small.onnx")


CASES = {
    "softmax": Case(
        lambda _: DenseLearner((6, 4)), lambda: nn.Sequential(nn.Linear(6, 4)), (6,), 4
    ),
    "dense": Case(lambda _: DenseLearner((6, 5, 3)), lambda: har_dnn(6, 5, 3), (6,), 3),
    "dense-last": Case(lambda _: DenseLearner((6, 5, 3), 1), lambda: har_dnn(6, 5, 3), (6,), 3),
    "chain-pictures": torch_case(lenet, (1, 28, 28), 10),
    "chain-sequences": torch_case(traffic_cnn, (3, 64), 20),
    "chain-last-two": torch_case(lenet, (1, 28, 28), 10, 2),
    "chain-head": torch_case(lambda: har_dnn(6, 5, 3), (6,), 3, 1),
    "mapped": torch_case(lambda: normalised(4), (12,), 4),
    "recurrent": torch_case(lambda: Recurrent(3), (5, 4), 3),
    "onnx": Case(exported, small_convolution, (2, 8), 4, frozen_body=True),
}


def batch_of(case: Case, n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        rng.normal(size=(n, *case.shape)).astype(np.float32),
        rng.integers(0, case.labels, n),
        np.arange(n),
    )


class WrittenOut:
    """A module in double precision."""

    def __init__(self, case: Case, valued: int) -> None:
        self._module, self._valued, self._frozen_body = (
            case.module().double(),
            valued,
            case.frozen_body,
        )

    def gradient(self, model: AnyArray, x: AnyArray, y: int) -> FloatArray:
        """The gradient of one sample's loss by all parameters."""
        leaves, start = {}, 0
        for name, parameter in self._module.named_parameters():
            part = torch.tensor(model[start : start + parameter.numel()], dtype=torch.float64).view(
                parameter.shape
            )
            leaves[name], start = part.requires_grad_(), start + parameter.numel()
        logits: Tensor = functional_call(
            self._module, leaves, (torch.tensor(x[None], dtype=torch.float64),)
        )
        parts = torch.autograd.grad(cross_entropy(logits, torch.tensor([y])), list(leaves.values()))
        return torch.cat([part.reshape(-1) for part in parts]).numpy()

    def gradients(self, model: AnyArray, batch: Batch) -> FloatArray:
        """The gradients of all samples by the valued parameters, (n, G)."""
        rows = [
            self.gradient(model, x, int(y))[-self._valued :]
            for x, y in zip(batch.x, batch.y, strict=True)
        ]
        return np.stack(rows)

    def trained(self, model: Vector, job: TrainingJob, local: LocalTraining) -> FloatArray:
        """Local SGD, step by step.

        w <- w - eta [sum_i gamma_i grad l_i(w) / sum_i gamma_i + correction + mu (w - w_0)].
        """
        w = model.astype(np.float64)
        for index in minibatches(len(job.batch), local, job.seed):
            part, gamma = job.batch.take(index), job.weights[index]
            if gamma.sum() == 0:
                continue
            step = local.proximal * (w - model)
            for weight, x, y in zip(gamma, part.x, part.y, strict=True):
                step += weight / gamma.sum() * self.gradient(w, x, int(y))
            if job.correction is not None:
                step[-self._valued :] += job.correction
            if self._frozen_body:
                step[: -self._valued] = 0
            w = w - local.learning_rate * step
        return w
