"""How good the global model is."""

from dataclasses import dataclass

import numpy as np

from fedkeep.core.ports import Learner
from fedkeep.core.types import AnyArray, Batch, BoolArray, FloatArray, Vector
from fedkeep.data import Federation, Stream
from fedkeep.learn.judging import judge

_WORST, _RAREST = 0.1, 0.25
"""The share of devices, and of labels, that must not be forgotten over a good mean."""


@dataclass(frozen=True, eq=False)
class ModelScores:
    """Accuracy and mean loss, pooled over all devices' test samples, and the accuracy on each device's own."""

    accuracy: float
    loss: float
    device_accuracy: FloatArray
    """(C,), NaN for a device without test samples."""
    label_recall: FloatArray
    """(Y,), NaN for a label without test samples."""
    worst_tenth: float
    """The mean accuracy of the worst tenth of the devices, one at least."""
    rare_recall: float
    """The mean recall of the rarest quarter of the labels in training, one at least."""


def evaluate(learner: Learner, model: Vector, data: Federation) -> ModelScores:
    """The model on the test samples; a model that has diverged is simply bad."""
    test = data.pooled_test
    losses, right = judge(learner, model, test.x, test.y)
    per_device, per_label = _shares(right, data.test.owners, data.devices), _shares(right, test.y, data.labels)
    return ModelScores(
        float(right.mean()),
        float(losses.mean()),
        per_device,
        per_label,
        _mean_of_first(np.sort(per_device), _WORST),
        _mean_of_first(per_label[np.argsort(data.label_counts.sum(axis=0), kind="stable")], _RAREST),
    )


def tested_first(learner: Learner, model: Vector, stream: Stream, devices: int, round_: int) -> tuple[int, int]:
    """How much of what arrives anywhere in a round the model has right, and how much it is: test, then train."""
    batch = Batch.concatenate([stream.arrivals(d, round_, round_ + 1) for d in range(devices)])
    return (int(judge(learner, model, batch.x, batch.y)[1].sum()), len(batch)) if len(batch) else (0, 0)


def _shares(right: BoolArray, groups: AnyArray, count: int) -> FloatArray:
    """The share of right answers in each group, NaN for an empty one."""
    counts = np.bincount(groups, minlength=count)
    sums = np.bincount(groups, weights=right, minlength=count)
    return np.asarray(np.divide(sums, counts, out=np.full(count, np.nan), where=counts > 0))


def _mean_of_first(values: FloatArray, share: float) -> float:
    """The mean of the first values, a share of those that are known."""
    known = values[~np.isnan(values)]
    return float(known[: max(1, round(share * len(known)))].mean())
