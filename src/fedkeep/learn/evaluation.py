"""How good a model is on some samples, for simulator, agent and Flower device alike."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep.core.protocols import Learner
from fedkeep.core.targets import WORST_R2, residuals
from fedkeep.core.types import AnyArray, BoolArray, FloatArray, IntArray, Vector
from fedkeep.learn.losses import CROSS_ENTROPY


def judge(
    learner: Learner, model: Vector, x: AnyArray, y: IntArray
) -> tuple[FloatArray, BoolArray]:
    """Compute each sample's loss, (n,), and whether its label was found.

    Nothing is right of a model that has diverged.

    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> identity = np.array([1, 0, 0, 1, 0, 0], dtype=np.float32)  # logits are the two features
    >>> x, y = np.array([[3.0, 0.0], [3.0, 0.0]]), np.array([0, 1])
    >>> losses, right = judge(DenseLearner((2, 2)), identity, x, y)
    >>> losses.round(3).tolist(), right.tolist()
    ([0.049, 3.049], [True, False])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        logits = np.asarray(learner.logits(model, x), dtype=np.float64)
        losses: FloatArray = getattr(learner, "loss", CROSS_ENTROPY).losses(logits, y)
    return losses, (logits.argmax(axis=1) == y) & np.isfinite(losses)


def predict(
    learner: Learner, model: Vector, x: AnyArray, y: AnyArray
) -> tuple[FloatArray, FloatArray]:
    """Compute each sample's loss, (n,), and what is predicted for it, in the targets' units.

    Returns
    -------
    tuple of FloatArray
        Losses, (n,), and predictions of the shape of `y`.

    Examples
    --------
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> from fedkeep.learn.losses import NumberLoss
    >>> learner = DenseLearner((1, 1), loss=NumberLoss(centre=10, scale=2))
    >>> model = np.array([1.0, 0.0], dtype=np.float32)  # the output is the feature
    >>> losses, predicted = predict(learner, model, np.array([[1.0]]), np.array([14.0]))
    >>> losses.tolist(), predicted.tolist()  # half of ((14 - 10) / 2 - 1) squared; 10 + 2 * 1
    ([0.5], [12.0])
    """
    loss: Any = getattr(learner, "loss", CROSS_ENTROPY)
    with np.errstate(over="ignore", invalid="ignore"):
        outputs = np.asarray(learner.logits(model, x), dtype=np.float64)
        losses = loss.losses(outputs, loss.targets(y, outputs.shape[1]))
        predicted = loss.predictions(outputs)
    return np.asarray(losses, dtype=np.float64), predicted.reshape(y.shape)


@dataclass(frozen=True)
class NumberScores:
    """How well numbers are predicted.

    `r2` is 1 - MSE / variance of the targets: 1 is perfect, 0 is as good as their mean. It is at
    least -1 here, so that one model that diverged does not decide a mean of several.

    References
    ----------
    Kvalseth, Cautionary Note about R2, The American Statistician, 1985, equation (1).
    """

    rmse: float
    """The root of the mean squared error, in the targets' units."""
    mae: float
    """The mean absolute error, in the targets' units."""
    r2: float


def number_scores(predicted: AnyArray, y: AnyArray) -> NumberScores:
    """Judge predictions of numbers; of several numbers a sample, all count alike.

    >>> y = np.array([1.0, 2.0, 3.0, 4.0])
    >>> scores = number_scores(np.array([1.0, 2.0, 3.0, 6.0]), y)
    >>> scores.rmse, scores.mae, round(scores.r2, 3)  # 1 - (4 / 4) / 1.25
    (1.0, 0.5, 0.2)
    """
    off = residuals(predicted, y)
    squared = float((off**2).mean())
    return NumberScores(float(np.sqrt(squared)), float(np.abs(off).mean()), r_squared(squared, y))


def r_squared(mean_squared: float, y: AnyArray) -> float:
    """Compute 1 - MSE / variance of these targets, at least `WORST_R2`; NaN of no sample."""
    variance = float(np.asarray(y, dtype=np.float64).var(axis=0).mean())
    if np.isnan(mean_squared):
        return float("nan")
    if variance == 0:
        return 1.0 if mean_squared == 0 else WORST_R2
    return max(WORST_R2, 1 - mean_squared / variance)
