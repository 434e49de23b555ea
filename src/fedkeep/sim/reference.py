"""References without a store: unlimited storage (FD), and all data in one place (CL of Theorem 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedkeep.core.gist import GistOptions
from fedkeep.core.ports import FleetLearner, Job
from fedkeep.core.seeds import child_seed
from fedkeep.core.types import Batch, DeviceId, Report, TrainOrder, Vector
from fedkeep.data import Federation, Ownership, Stream


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
        batch = self._batch(device, order.round)
        if not len(batch):
            return Report(order.round, order.model, 0.0, 0, 0, None)
        seed = child_seed(self._seed, "device", device, "train", order.round)
        gradient = self._learner.probe(order.model).measure(batch).mean_gradient() if self._gist.shared else None
        if gradient is not None and order.direction is not None:
            drift = np.float32(self._gist.kappa) * (order.direction - gradient)
            correction = drift if correction is None else correction + drift
        model = self._learner.train(order.model, Job(batch, np.ones(len(batch)), seed, correction), order.local)
        per_epoch = -(-len(batch) // order.local.batch_size) if order.local.batch_size else 1
        weight = self._stream.rate(device) / order.assignment.mass_per_slot if order.assignment else float(len(batch))
        return Report(order.round, model, weight, order.local.epochs * per_epoch, len(batch), gradient, len(batch))

    def _batch(self, device: DeviceId, round_: int) -> Batch:
        if self._so_far:
            return self._stream.seen_before(device, round_ + 1)
        return self._stream.training_set(device)


def pooled(data: Federation) -> Federation:
    """The same data on a single device."""

    def one(members: Ownership) -> Ownership:
        return Ownership(members.indices, np.array([0, len(members.indices)]))

    return replace(data, train=one(data.train), test=one(data.test), device_names=None)
