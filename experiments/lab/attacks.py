"""What a curious server can learn from an uploaded g_hat_c of a last layer: to be tried before one trusts a setting.

The last layer is linear with weight W (Y, d) and bias b, under softmax cross-entropy: a sample with input h and error
e = softmax(W h + b) - onehot(y) has the gradient e (h, 1)^T, and g_hat_c is the mean over n of them.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from fedkeep.core.estimators import clip_weights
from fedkeep.core.ports import Measurements
from fedkeep.core.types import FloatArray, IntArray, Scores, Vector

_MOMENTUM, _SCALE, _TINY = 0.9, 0.999, 1e-12


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The layer that the server knows, since it sent it."""

    weight: FloatArray
    bias: FloatArray

    @classmethod
    def of(cls, vector: Vector, classes: int) -> Self:
        """The layer, or its gradient, in the flat order of weight (Y, d), then bias."""
        values = vector.astype(np.float64)
        return cls(values[:-classes].reshape(classes, -1), values[-classes:])

    def errors(self, inputs: FloatArray, labels: IntArray) -> FloatArray:
        """softmax(W h + b) - onehot(y) per sample, (n, Y)."""
        logits = inputs @ self.weight.T + self.bias
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        errors: FloatArray = shares - np.eye(len(self.bias))[labels]
        return errors


def invert_analytically(gradient: LastLayer) -> FloatArray:
    """The input behind the gradient of one sample, (d,): a row of the weight's gradient over its bias's.

    Exact for n = 1. For more it gives the mean of the inputs, weighted by their errors in the most telling class.
    """
    row = int(np.abs(gradient.bias).argmax())
    inputs: FloatArray = gradient.weight[row] / gradient.bias[row]
    return inputs


def invert_by_matching(
    layer: LastLayer, gradient: LastLayer, labels: IntArray, start: FloatArray, steps: int = 400, rate: float = 0.05
) -> FloatArray:
    """Inputs in [0, 1] whose mean gradient comes closest to the uploaded one, (n, d), by Adam from `start`."""
    inputs, first, second = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for step in range(1, steps + 1):
        slope = _slope(layer, gradient, inputs, labels)
        first = _MOMENTUM * first + (1 - _MOMENTUM) * slope
        second = _SCALE * second + (1 - _SCALE) * slope**2
        size = np.sqrt(second / (1 - _SCALE**step)) + _TINY
        inputs = np.clip(inputs - rate * first / (1 - _MOMENTUM**step) / size, 0.0, 1.0)
    return inputs


def _slope(layer: LastLayer, gradient: LastLayer, inputs: FloatArray, labels: IntArray) -> FloatArray:
    """The derivative by the inputs of half the squared distance between their mean gradient and the uploaded one."""
    n = len(inputs)
    errors = layer.errors(inputs, labels)
    weight_off = errors.T @ inputs / n - gradient.weight
    bias_off = errors.mean(axis=0) - gradient.bias
    by_error = inputs @ weight_off.T + bias_off
    shares = errors + np.eye(len(bias_off))[labels]
    by_logit = shares * (by_error - (shares * by_error).sum(axis=1, keepdims=True))
    slope: FloatArray = (errors @ weight_off + by_logit @ layer.weight) / n
    return slope


@dataclass(frozen=True, eq=False)
class MembershipAttack:
    """An attacker who holds an upload, knows how many samples it is of and their labels, and has data like theirs."""

    uploaded: Vector
    labels: IntArray
    typical: FloatArray
    """The mean gradient of each label, (Y, P), from the attacker's own data."""
    clip: float
    """The clip of the devices, infinity for none."""

    def scores(self, candidates: Measurements, labels: IntArray) -> Scores:
        """How much better the upload is explained with each candidate among its samples than without it.

        Without it, the mean of the labels' typical gradients is expected; with it, that mean moved by what is
        particular to the candidate, over n. The score is the squared distance gained, over what there was to gain.
        """
        n = len(self.labels)
        lean = self.uploaded - self.typical[self.labels].mean(axis=0)
        weights = clip_weights(candidates.norms(), self.clip) if np.isfinite(self.clip) else np.ones(len(labels))
        along = weights * candidates.projections(lean.astype(np.float32))
        squares = (weights * candidates.norms()) ** 2
        for label, usual in enumerate(self.typical):
            own = labels == label
            along[own] -= float(lean @ usual)
            shared = weights[own] * candidates.projections(usual.astype(np.float32))[own]
            squares[own] += float(usual @ usual) - 2 * shared
        return (2 * along / n - squares / n**2) / max(float(lean @ lean), _TINY)


def advantage(members: Scores, others: Scores) -> float:
    """The chance that a member outscores another (area under the ROC curve): 0.5 is guessing."""
    wins = (members[:, None] > others[None, :]).mean() + 0.5 * (members[:, None] == others[None, :]).mean()
    return float(wins)


def similarity(guesses: FloatArray, truths: FloatArray) -> FloatArray:
    """For each true input the correlation with the guess that is most like it, (n,)."""
    centred = [rows - rows.mean(axis=1, keepdims=True) for rows in (truths, guesses)]
    unit = [rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _TINY) for rows in centred]
    best: FloatArray = (unit[0] @ unit[1].T).max(axis=1)
    return best
