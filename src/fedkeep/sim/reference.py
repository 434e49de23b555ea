"""References without a store: unlimited storage (FD), and all data in one place (CL of Theorem 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedkeep.core.ports import FleetLearner, Job
from fedkeep.core.seeds import child_seed
from fedkeep.core.types import DeviceId, Report, TrainOrder
from fedkeep.data import Federation, Membership, Stream


class FullFleet:
    """Devices that train on all their data in every round, weighed by its quantity."""

    def __init__(self, learner: FleetLearner, stream: Stream, seed: int) -> None:
        self._learner, self._stream, self._seed = learner, stream, seed

    def take_part(self, orders: Mapping[DeviceId, TrainOrder]) -> dict[DeviceId, Report]:
        return {d: self._report(d, order) for d, order in orders.items()}

    def _report(self, device: DeviceId, order: TrainOrder) -> Report:
        batch = self._stream.training_set(device)
        seed = child_seed(self._seed, "device", device, "train", order.round)
        model = self._learner.train(order.model, Job(batch, np.ones(len(batch)), seed), order.local)
        per_epoch = -(-len(batch) // order.local.batch_size) if order.local.batch_size else 1
        weight = self._stream.rate(device) / order.assignment.mass_per_slot if order.assignment else float(len(batch))
        return Report(order.round, model, weight, order.local.epochs * per_epoch, len(batch), None)


def pooled(data: Federation) -> Federation:
    """The same data on a single device."""

    def one(members: Membership) -> Membership:
        return Membership(members.indices, np.array([0, len(members.indices)]))

    return replace(data, train=one(data.train), test=one(data.test), device_names=None)
