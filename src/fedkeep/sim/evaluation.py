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


class Prequential:
    """Test, then train: the global model on what arrives anywhere in a round, before anybody trains on it."""

    def __init__(self, learner: Learner, stream: Stream, devices: int) -> None:
        self._learner, self._stream, self._devices = learner, stream, devices
        self._right = self._seen = 0

    def test(self, model: Vector, round_: int) -> None:
        arrivals = [self._stream.arrivals(d, round_, round_ + 1) for d in range(self._devices)]
        batch = Batch.concatenate(arrivals)
        if len(batch):
            _, right = judge(self._learner, model, batch.x, batch.y)
            self._right += int(right.sum())
            self._seen += len(batch)

    def take(self) -> float | None:
        """The accuracy since this was last asked; None if nothing arrived."""
        accuracy = self._right / self._seen if self._seen else None
        self._right = self._seen = 0
        return accuracy


def _shares(right: BoolArray, groups: AnyArray, count: int) -> FloatArray:
    """The share of right answers in each group, NaN for an empty one."""
    counts = np.bincount(groups, minlength=count)
    sums = np.bincount(groups, weights=right, minlength=count)
    shares: FloatArray = np.divide(sums, counts, out=np.full(count, np.nan), where=counts > 0)
    return shares


def _mean_of_first(values: FloatArray, share: float) -> float:
    """The mean of the first values, a share of those that are known."""
    known = values[~np.isnan(values)]
    return float(known[: max(1, round(share * len(known)))].mean())
