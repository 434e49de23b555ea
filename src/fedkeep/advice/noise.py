"""The share of wrong labels, by confident learning on probabilities that are out of sample.

References
----------
Northcutt, Jiang and Chuang, Confident learning: estimating uncertainty in dataset labels, Journal
of Artificial Intelligence Research 70, 2021.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedkeep.core.types import AnyArray, FloatArray, IntArray

Predictor: TypeAlias = Callable[[FloatArray, IntArray, FloatArray, int], FloatArray]
"""From samples, their labels and other samples to class probabilities of the latter."""
_FOLDS = 4
_NEIGHBOURS = 25
_STEPS = 150
_RIDGE = 1e-3
_RESAMPLES = 200


@dataclass(frozen=True)
class NoiseEstimate:
    """The estimated share of wrong labels, with its 95 % interval (bootstrap over samples)."""

    share: float
    low: float
    high: float


def wrong_labels(x: AnyArray, y: IntArray, rng: np.random.Generator) -> NoiseEstimate:
    """Estimate the share of wrong labels.

    Class probabilities are predicted by cross-validation, with a softmax regression or with
    nearest neighbours, whichever has the smaller log loss. Where the classes overlap, samples
    that no classifier could tell apart count as well.

    Parameters
    ----------
    x : array
        Samples, one a row, of any shape.
    y : array of int
        Their labels.
    rng : numpy.random.Generator
        Draws the folds and the bootstrap.
    """
    labels = np.unique(y)
    if len(y) < 2 * _FOLDS or len(labels) < 2:
        return NoiseEstimate(0.0, 0.0, 1.0)
    codes = np.searchsorted(labels, y)
    features = _scaled(x.reshape(len(x), -1).astype(np.float64))
    folds = rng.permutation(len(y)) % _FOLDS
    predicted = [
        _out_of_sample(predict, features, codes, folds, len(labels))
        for predict in (_softmax_regression, _nearest_neighbours)
    ]
    losses = [-np.log(p[np.arange(len(y)), codes] + 1e-9).mean() for p in predicted]
    best = predicted[int(np.argmin(losses))]
    share = _confident_share(best, codes)
    draws = rng.integers(0, len(y), (_RESAMPLES, len(y)))
    shares = [_confident_share(best[rows], codes[rows]) for rows in draws]
    low, high = np.quantile(shares, [0.025, 0.975])
    return NoiseEstimate(share, float(low), float(high))


def _scaled(x: FloatArray) -> FloatArray:
    deviation = x.std(axis=0)
    scaled: FloatArray = (x - x.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return scaled


def _confident_share(p: FloatArray, y: IntArray) -> float:
    """Return the off-diagonal share of the confident joint, calibrated to the label counts."""
    labels = p.shape[1]
    counts = np.bincount(y, minlength=labels)
    sums = np.array([p[y == label, label].sum() for label in range(labels)])
    # The threshold of a class is the mean confidence of the samples that are labelled with it.
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    confident = np.where(p >= thresholds, p, -1.0)
    likely = confident.argmax(axis=1)
    known = confident.max(axis=1) >= 0
    joint = np.zeros((labels, labels))
    np.add.at(joint, (y[known], likely[known]), 1.0)
    rows = joint.sum(axis=1)
    shares = np.where(rows > 0, 1 - np.diag(joint) / np.maximum(rows, 1), 0.0)
    return float((shares * counts).sum() / counts.sum())


def _out_of_sample(
    predict: Predictor,
    x: FloatArray,
    y: IntArray,
    folds: IntArray,
    labels: int,
) -> FloatArray:
    p = np.empty((len(y), labels))
    for fold in range(_FOLDS):
        away = folds == fold
        p[away] = predict(x[~away], y[~away], x[away], labels)
    return p


def _softmax_regression(x: FloatArray, y: IntArray, asked: FloatArray, labels: int) -> FloatArray:
    """Fit by Nesterov's accelerated gradient, with a step from the largest curvature."""
    rows = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    wanted = np.eye(labels)[y]
    step = 1 / (0.5 * np.linalg.norm(rows, 2) ** 2 / len(rows) + _RIDGE)
    weights = before = np.zeros((rows.shape[1], labels))
    for number in range(1, _STEPS + 1):
        ahead = weights + (number - 1) / (number + 2) * (weights - before)
        error = _softmax(rows @ ahead) - wanted
        before, weights = weights, ahead - step * (rows.T @ error / len(rows) + _RIDGE * ahead)
    return _softmax(np.concatenate([asked, np.ones((len(asked), 1))], axis=1) @ weights)


def _softmax(logits: FloatArray) -> FloatArray:
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: FloatArray = exponents / exponents.sum(axis=1, keepdims=True)
    return shares


def _nearest_neighbours(x: FloatArray, y: IntArray, asked: FloatArray, labels: int) -> FloatArray:
    count = min(_NEIGHBOURS, len(x))
    distances = (x**2).sum(axis=1) - 2 * asked @ x.T
    nearest = np.argpartition(distances, count - 1, axis=1)[:, :count]
    votes = np.eye(labels)[y[nearest]].sum(axis=1)
    smoothed: FloatArray = (votes + 1 / labels) / (count + 1)
    return smoothed
