"""How good the global model is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeep.core.ports import Learner
from fedkeep.core.types import FloatArray, Vector
from fedkeep.data import Federation


@dataclass(frozen=True, eq=False)
class Evaluated:
    """Accuracy and mean loss, pooled over all devices' test samples, and the accuracy on each device's own."""

    accuracy: float
    loss: float
    device_accuracy: FloatArray
    """(C,), NaN for a device without test samples."""


def evaluate(learner: Learner, model: Vector, data: Federation) -> Evaluated:
    """The model on the test samples; a model that has diverged is simply bad."""
    test = data.pooled_test
    with np.errstate(over="ignore", invalid="ignore"):
        logits = np.asarray(learner.logits(model, test.x), dtype=np.float64)
        losses = _log_sum_exp(logits) - logits[np.arange(len(test)), test.y]
    right = (logits.argmax(axis=1) == test.y) & np.isfinite(losses)
    counts = np.diff(data.test.offsets)
    sums = np.diff(np.concatenate([[0], np.cumsum(right)])[data.test.offsets])
    per_device = np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)
    return Evaluated(float(right.mean()), float(losses.mean()), per_device)


def _log_sum_exp(logits: FloatArray) -> FloatArray:
    top = logits.max(axis=1, keepdims=True)
    total: FloatArray = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return total
