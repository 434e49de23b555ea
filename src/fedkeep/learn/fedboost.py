"""FedBoost (Hamer, Mohri and Suresh, ICML 2020): devices learn how to mix fixed predictors.

A model is the mixture's weights alpha, q numbers that sum to 1. The mixture gives a label
sum_k alpha_k h_k(x), and its loss is minus the logarithm of that. A local step is mirror descent by
the entropy, alpha_k <- alpha_k exp(-eta g_k) / Z; the mean of models is a mixture again. A device
is not sent all predictors: it gets h_k with probability gamma_k, and trains on the mixture by
alpha_k / gamma_k of those that it got, which is right on average.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

import numpy as np

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.protocols import PerSampleGradients, TrainingJob
from fedkeep.core.seeds import generator
from fedkeep.core.slices import of_kind
from fedkeep.core.types import AnyArray, Batch, FloatArray, LocalTraining, Scores, Vector
from fedkeep.learn.backends import BatchMeasurements, FrozenModel, minibatches
from fedkeep.learn.dense_learner import DenseLearner

_TINY = 1e-12
"""The least that a label is given: no loss is infinite."""


class FedBoost:
    """The learner of a mixture: `model = { name = "fedboost", predictors = "base.npz" }`.

    Parameters
    ----------
    sample_shape : tuple of int
        The shape of a sample.
    classes : int
        How many labels there are.
    predictors : str
        An npz file with `models` (q, P), dense networks, and `hidden`, the widths of their hidden
        layers.
    sampled : float, optional
        How many of them a device gets on average; left out: all.
    sampling : {"weighted", "uniform"}
        `weighted` sampling is by alpha itself.

    References
    ----------
    Hamer, Mohri, Suresh, FedBoost: communication-efficient algorithms for federated learning,
    ICML 2020.
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
                f"{predictors} does not fit: "
                f"a predictor of this data has {self._base.size} parameters"
            )
        if sampled is not None and not sampled > 0:
            raise ConfigError(f"model.sampled must be above 0, got {sampled}")
        self._sampled, self._sampling = sampled, sampling
        self.size = self.gradient_size = len(self._models)

    def tail(self, layers: int | None) -> int:  # noqa: ARG002 - it has none
        """Count the parameters of the last layers: all, since there are no layers.

        Parameters
        ----------
        layers : int or None
            Not used.

        Returns
        -------
        int
            q.
        """
        return self.size

    def gradient_shapes(self, layers: int | None) -> tuple[tuple[int, ...], ...]:
        """Give the shape of the mixture's weights."""
        return ((self.tail(layers),),)

    def initial(self, seed: int) -> Vector:  # noqa: ARG002 - nothing is drawn
        """Make the first model: all predictors alike.

        Parameters
        ----------
        seed : int
            Not used.

        Returns
        -------
        ndarray of float32, shape (q,)
            1 / q each.
        """
        return np.full(self.size, 1 / self.size, dtype=np.float32)

    def probe(self, model: Vector) -> FrozenModel:
        """Fix a model to measure samples with.

        Parameters
        ----------
        model : ndarray of float32, shape (q,)
            alpha.

        Returns
        -------
        FrozenModel
            Measures batches under it.
        """
        return FrozenModel(self, model)

    def measure_many(
        self, models: Sequence[Vector], batches: Sequence[Batch]
    ) -> list["MixtureMeasurements"]:
        """Measure a batch under each model.

        Parameters
        ----------
        models : sequence of ndarray
            One alpha for each batch.
        batches : sequence of Batch
            The samples.

        Returns
        -------
        list of MixtureMeasurements
            One for each.
        """
        return [MixtureMeasurements(self, *pair) for pair in zip(models, batches, strict=True)]

    def train_many(
        self, model: Vector, jobs: Sequence[TrainingJob], local: LocalTraining
    ) -> list[Vector]:
        """Train one model on the samples of several devices.

        Parameters
        ----------
        model : ndarray of float32, shape (q,)
            Where all begin.
        jobs : sequence of TrainingJob
            One for each device.
        local : LocalTraining
            Rate and epochs.

        Returns
        -------
        list of ndarray of float32, shape (q,)
            The trained models.
        """
        return [self.train(model, job, local) for job in jobs]

    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        """Train by mirror descent over the mixtures of the predictors that were sent.

        Parameters
        ----------
        model : ndarray of float32, shape (q,)
            alpha before.
        job : TrainingJob
            The device's samples and their weights.
        local : LocalTraining
            Rate and epochs.

        Returns
        -------
        ndarray of float32, shape (q,)
            alpha after, which sums to 1.
        """
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
        """Give 1 / gamma_k for every predictor that a device gets, 0 for the others, (q,)."""
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
        """Give the logarithm of the mixture's probabilities.

        Parameters
        ----------
        model : ndarray of float32, shape (q,)
            alpha.
        x : ndarray, shape (n, ...)
            Samples.

        Returns
        -------
        ndarray, shape (n, classes)
            Logits.
        """
        mixed: AnyArray = np.tensordot(np.maximum(model, 0.0), self.predicted(x), axes=1)
        return np.log(np.maximum(mixed, _TINY))

    def given(self, batch: Batch) -> FloatArray:
        """Give what each predictor gives the label of each sample, (n, q)."""
        return np.asarray(
            self.predicted(batch.x)[:, np.arange(len(batch)), batch.y].T, dtype=np.float64
        )

    def predicted(self, x: AnyArray) -> AnyArray:
        """Give the probabilities of every predictor, (q, n, classes)."""
        logits = np.stack([self._base.logits(model, x) for model in self._models])
        powers = np.exp(logits - logits.max(axis=2, keepdims=True))
        return np.asarray(powers / powers.sum(axis=2, keepdims=True))


def slopes(given: FloatArray, alpha: FloatArray) -> FloatArray:
    """Give every sample's gradient by alpha, (n, q)."""
    return -given / np.maximum(given @ alpha, _TINY)[:, None]


class MixtureMeasurements(BatchMeasurements):
    """A batch measured by all predictors: a device that values by gradients has them all.

    Parameters
    ----------
    learner : FedBoost
        The predictors.
    model : ndarray of float32, shape (q,)
        alpha.
    batch : Batch
        n samples.
    """

    def __init__(self, learner: FedBoost, model: Vector, batch: Batch) -> None:
        given, alpha = learner.given(batch), model.astype(np.float64)
        self.gradients = slopes(given, alpha)
        self._losses: Scores = -np.log(np.maximum(given @ alpha, _TINY))
        self._learner, self._x, self._n = learner, batch.x, len(batch)

    def losses(self) -> Scores:
        """Give the loss of each sample.

        Returns
        -------
        ndarray of float, shape (n,)
            Minus the logarithm of what the mixture gives its label.
        """
        return self._losses

    def projections(self, direction: Vector) -> Scores:
        """Project each sample's gradient on a direction.

        Parameters
        ----------
        direction : ndarray of float32, shape (q,)
            g_hat.

        Returns
        -------
        ndarray of float, shape (n,)
            Eq. 6.
        """
        return self.gradients @ direction.astype(np.float64)

    def inner(self, other: PerSampleGradients) -> Scores:
        """Multiply each sample's gradient with the same sample's in another measurement.

        Parameters
        ----------
        other : PerSampleGradients
            The same samples under another model.

        Returns
        -------
        ndarray of float, shape (n,)
            Inner products.
        """
        return np.asarray(
            (self.gradients * of_kind(MixtureMeasurements, other).gradients).sum(axis=1)
        )

    head_norms = BatchMeasurements.norms

    def weighted_gradient(self, weights: Scores) -> Vector:
        """Give the mean of the weighted gradients.

        Parameters
        ----------
        weights : ndarray of float, shape (n,)
            One for each sample.

        Returns
        -------
        ndarray of float32, shape (q,)
            The sum over n.
        """
        return np.asarray(weights @ self.gradients / len(weights), dtype=np.float32)

    def activations(self) -> AnyArray:
        """Give the probabilities of all predictors side by side, (n, q * classes)."""
        return self._learner.predicted(self._x).swapaxes(0, 1).reshape(len(self._x), -1)
