"""How good a model is on some samples, for simulator, agent and Flower device alike."""

import numpy as np

from fedkeep.core.protocols import Learner
from fedkeep.core.types import AnyArray, BoolArray, FloatArray, IntArray, Vector
from fedkeep.learn.dense_learner import cross_entropy


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
        losses: FloatArray = cross_entropy(logits, y)
    return losses, (logits.argmax(axis=1) == y) & np.isfinite(losses)
