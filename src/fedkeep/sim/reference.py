"""What no real fleet has: unlimited storage (FD), all data in one place (CL of Theorem 2), exact gradients."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedkeep.core.estimators import Estimate
from fedkeep.core.gist import GistOptions
from fedkeep.core.ports import FleetLearner, Job, Learner
from fedkeep.core.seeds import child_seed, generator
from fedkeep.core.types import Batch, DeviceId, FloatArray, IntArray, Report, TrainOrder, Vector
from fedkeep.data import Federation, Ownership, Stream

_CHUNK = 4096


class FullFleet:
    """Devices that train on all their data, or all that has come so far, in every round, weighed by its rate.

    With a shared gist, which here is the exact gradient, they have its correction of the drift between devices too.
    """

    def __init__(self, learner: FleetLearner, stream: Stream, gist: GistOptions, seed: int, *, so_far: bool) -> None:
        self._learner, self._stream, self._gist, self._seed, self._so_far = learner, stream, gist, seed, so_far

    def take_part(
        self, orders: Mapping[DeviceId, TrainOrder], corrections: Mapping[DeviceId, Vector]
    ) -> dict[DeviceId, Report]:
        return {d: self._report(d, order, corrections.get(d)) for d, order in orders.items()}

    def _report(self, device: DeviceId, order: TrainOrder, correction: Vector | None) -> Report:
        stream = self._stream
        batch = stream.seen_before(device, order.round + 1) if self._so_far else stream.training_set(device)
        if not len(batch):
            return Report(order.round, order.model, 0.0, 0, 0, None)
        seed = child_seed(self._seed, "device", device, "train", order.round)
        gradient = self._learner.probe(order.model).measure(batch).mean_gradient() if self._gist.shared else None
        if gradient is not None and order.direction is not None:
            drift = np.float32(self._gist.kappa) * (order.direction - gradient)
            correction = drift if correction is None else correction + drift
        model = self._learner.train(order.model, Job(batch, np.ones(len(batch)), seed, correction), order.local)
        per_epoch = -(-len(batch) // order.local.batch_size) if order.local.batch_size else 1
        weight = float(stream.rates[device]) / order.assignment.mass_per_slot if order.assignment else float(len(batch))
        return Report(order.round, model, weight, order.local.epochs * per_epoch, len(batch), gradient, len(batch))


def pooled(data: Federation) -> Federation:
    """The same data on a single device."""

    def one(members: Ownership) -> Ownership:
        return Ownership(members.indices, np.array([len(members.indices)]))

    return replace(data, train=one(data.train), test=one(data.test), device_names=None)


class Oracle:
    """Exact gradients of the global loss and of each device's, over all samples or a fixed seeded subset."""

    def __init__(self, learner: Learner, data: Federation, samples: int | None, seed: int) -> None:
        self._learner, self._data = learner, data
        self._ids = np.sort(data.train.indices)
        if samples is not None and samples < len(self._ids):
            self._ids = np.sort(generator(seed, "oracle").choice(self._ids, samples, replace=False))

    def gradient(self, model: Vector) -> Vector:
        """The global gradient: every device weighs as many samples as it has."""
        return self._mean(model, self._ids).astype(np.float32)

    def device_gradients(self, model: Vector, rates: dict[DeviceId, float]) -> dict[DeviceId, Estimate]:
        """Every device's gradient over its training samples, as if each had reported before the first round."""
        return {
            d: Estimate(self._mean(model, self._data.train.of(d)).astype(np.float32), rate, -1)
            for d, rate in rates.items()
        }

    def _mean(self, model: Vector, ids: IntArray) -> FloatArray:
        probe = self._learner.probe(model)
        total = np.zeros(self._learner.gradient_size)
        for start in range(0, len(ids), _CHUNK):
            part: Batch = self._data.take(ids[start : start + _CHUNK])
            total += probe.measure(part).mean_gradient().astype(np.float64) * len(part)
        return total / len(ids)
