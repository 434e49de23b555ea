"""FedBoost (Hamer, Mohri and Suresh, 2020), a learner of one's own: devices learn how to mix fixed predictors.

A model is the mixture's weights alpha, q numbers that sum to 1. The mixture gives a label sum_k alpha_k h_k(x), and its
loss is minus the logarithm of that. A local step is mirror descent by the entropy, alpha_k <- alpha_k exp(-eta g_k)/Z;
the mean of models is a mixture again. A device is not sent all predictors: it gets h_k with probability gamma_k, and
trains on the mixture by alpha_k / gamma_k of those that it got, which is right on average.

Run it from the repository's folder: eight predictors are fixed, each trained on one device of another fleet, half of
them on labels that are mostly wrong, and devices with ten samples each find out which to trust, sent three a round.
"""

import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from fedkeep.config.experiment import resolve
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.protocols import PerSampleGradients, TrainingJob
from fedkeep.core.seeds import generator
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Batch, FloatArray, LocalTraining, Scores, Vector
from fedkeep.data.synthetic import Demo
from fedkeep.learn.backends import BatchMeasurements, FrozenModel, minibatches
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.sim.engine import Simulator

_TINY = 1e-12
"""The least that a label is given: no loss is infinite."""


class FedBoost:
    """The learner of a mixture: `model = { name = "examples/fedboost.py:FedBoost", predictors = "base.npz" }`.

    `predictors` is an npz file with `models` (q, P), dense networks, and `hidden`, the widths of their hidden layers;
    `sampled` is how many of them a device gets on average, left out: all; `weighted` sampling is by alpha itself.
    """

    def __init__(
        self,
        sample_shape: tuple[int, ...],
        classes: int,
        *,
        predictors: str,
        sampled: float | None = None,
        sampling: Literal["weighted", "uniform"] = "weighted",
    ) -> None:
        try:
            with np.load(predictors, allow_pickle=False) as file:
                self._base = DenseLearner((prod(sample_shape), *file["hidden"].tolist(), classes))
                self._models: AnyArray = file["models"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{predictors} holds no predictors, as arrays models and hidden: {error}"
            ) from error
        if self._models.ndim != 2 or self._models.shape[1] != self._base.size:
            raise DataError(
                f"{predictors} does not fit: a predictor of this data has {self._base.size} parameters"
            )
        if sampled is not None and not sampled > 0:
            raise ConfigError(f"model.sampled must be above 0, got {sampled}")
        self._sampled, self._sampling = sampled, sampling
        self.size = self.gradient_size = len(self._models)

    def tail(self, layers: int | None) -> int:
        return self.size

    def initial(self, seed: int) -> Vector:
        return np.full(self.size, 1 / self.size, dtype=np.float32)

    def probe(self, model: Vector) -> FrozenModel:
        return FrozenModel(self, model)

    def measure_many(
        self, models: Sequence[Vector], batches: Sequence[Batch]
    ) -> list["MixtureMeasurements"]:
        return [MixtureMeasurements(self, *pair) for pair in zip(models, batches, strict=True)]

    def train_many(
        self, model: Vector, jobs: Sequence[TrainingJob], local: LocalTraining
    ) -> list[Vector]:
        return [self.train(model, job, local) for job in jobs]

    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        first = alpha = np.maximum(model.astype(np.float64), _TINY)
        factors, given = self.drawn(alpha, job.seed), self.given(job.batch)
        for index in minibatches(len(job.batch), local, job.seed):
            weights = job.weights[index]
            if not weights.any() or not factors.any():
                continue
            gradient = weights / weights.sum() @ slopes(given[index] * factors, alpha)
            gradient += local.proximal * (alpha - first) + (
                0 if job.correction is None else job.correction
            )
            alpha = alpha * np.exp(-local.learning_rate * (gradient - gradient.min()))
            alpha = np.maximum(alpha / alpha.sum(), _TINY)
        return alpha.astype(np.float32)

    def drawn(self, alpha: FloatArray, seed: int) -> FloatArray:
        """1 / gamma_k for every predictor that a device gets, 0 for the others, (q,)."""
        if self._sampled is None:
            return np.ones(self.size)
        shares = (
            alpha / alpha.sum()
            if self._sampling == "weighted"
            else np.full(self.size, 1 / self.size)
        )
        gamma = np.minimum(1.0, self._sampled * shares)
        return (generator(seed, "predictors").random(self.size) < gamma) / gamma

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        mixed: AnyArray = np.tensordot(np.maximum(model, 0.0), self.predicted(x), axes=1)
        return np.log(np.maximum(mixed, _TINY))

    def given(self, batch: Batch) -> FloatArray:
        """What each predictor gives the label of each sample, (n, q)."""
        return np.asarray(
            self.predicted(batch.x)[:, np.arange(len(batch)), batch.y].T, dtype=np.float64
        )

    def predicted(self, x: AnyArray) -> AnyArray:
        """What the predictors say, (q, n, classes)."""
        logits = np.stack([self._base.logits(model, x) for model in self._models])
        powers = np.exp(logits - logits.max(axis=2, keepdims=True))
        return np.asarray(powers / powers.sum(axis=2, keepdims=True))


def slopes(given: FloatArray, alpha: FloatArray) -> FloatArray:
    """Every sample's gradient by alpha, (n, q)."""
    return -given / np.maximum(given @ alpha, _TINY)[:, None]


class MixtureMeasurements(BatchMeasurements):
    """By all predictors: a device that values by gradients has them all. Few parameters: the gradients are small."""

    def __init__(self, learner: FedBoost, model: Vector, batch: Batch) -> None:
        given, alpha = learner.given(batch), model.astype(np.float64)
        self.gradients = slopes(given, alpha)
        self._losses: Scores = -np.log(np.maximum(given @ alpha, _TINY))
        self._learner, self._x, self._n = learner, batch.x, len(batch)

    def losses(self) -> Scores:
        return self._losses

    def projections(self, direction: Vector) -> Scores:
        return self.gradients @ direction.astype(np.float64)

    def inner(self, other: PerSampleGradients) -> Scores:
        return np.asarray(
            (self.gradients * of_kind(MixtureMeasurements, other).gradients).sum(axis=1)
        )

    head_norms = BatchMeasurements.norms

    def weighted_gradient(self, weights: Scores) -> Vector:
        return np.asarray(weights @ self.gradients / len(weights), dtype=np.float32)

    def activations(self) -> AnyArray:
        """What the predictors say, side by side, (n, q * classes)."""
        return self._learner.predicted(self._x).swapaxes(0, 1).reshape(len(self._x), -1)


def main() -> None:
    elsewhere = Demo(devices=8).load(seed=1)
    net = DenseLearner((30, 10))
    models = []
    for device in range(8):
        batch = elsewhere.train_batch(device)
        wrong = np.random.default_rng(device).random(len(batch)) < (0.7 if device % 2 else 0.0)
        labels = np.where(wrong, (batch.y + 3) % 10, batch.y)
        job = TrainingJob(Batch(batch.x, labels, batch.ids), np.ones(len(batch)), seed=0)
        models.append(net.train(net.initial(device), job, LocalTraining(0.1, epochs=200)))

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base.npz")
        np.savez(base, models=np.stack(models), hidden=np.array([], dtype=np.int64))
        simulator = Simulator(
            resolve(
                {
                    "task": {"name": "demo", "devices": 20},
                    "model": {
                        "name": "examples/fedboost.py:FedBoost",
                        "predictors": str(base),
                        "sampled": 3,
                    },
                    "policy": {"name": "fifo"},
                    "train": {"rounds": 100, "participation": 0.2, "learning_rate": 0.05},
                    "record": {"every": 25},
                }
            )
        )
        print(f"alike     accuracy {simulator.evaluate().accuracy:.1%}")
        for record in simulator.run():
            if record.evaluation:
                print(f"round {record.round:3} accuracy {record.evaluation.accuracy:.1%}")
        weights = " ".join(f"{weight:.2f}" for weight in simulator.server.model)
        print(f"weights of the predictors, every other one taught wrong: {weights}")


if __name__ == "__main__":
    main()
