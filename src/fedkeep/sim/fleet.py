"""The simulated devices: made when first needed, brought up to date when selected."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.ports import FleetLearner, Job, Measurements, Outcome
from fedkeep.core.slices import Deferred, SliceOf
from fedkeep.core.state import put_numbered, take_numbered
from fedkeep.core.types import Batch, DeviceId, Report, State, TrainOrder, Vector
from fedkeep.data import Stream

Watcher = Callable[[DeviceId, Batch, Outcome], None]


class SimulatedFleet:
    """Devices that catch up on their streams only when somebody asks.

    A device's model and direction change only when it takes part, so one large batch under its last model, just
    before it takes part, gives what valuing every sample as it came would have given.
    """

    def __init__(self, learner: FleetLearner, stream: Stream, make: Callable[[DeviceId], Device]) -> None:
        self.learner, self.stream = learner, stream
        self.devices: dict[DeviceId, Device] = {}
        self.watchers: list[Watcher] = []
        self._make = make
        self._seen: dict[DeviceId, int] = {}

    def device(self, device: DeviceId) -> Device:
        """The device, made if this is the first anybody hears of it."""
        if device not in self.devices:
            self.devices[device] = self._make(device)
            self._seen[device] = 0
        return self.devices[device]

    def catch_up(self, devices: Sequence[DeviceId], until: int) -> int:
        """Lets the devices see all that arrived before round `until`; returns how many samples that was."""
        woken = {d: self.device(d) for d in devices}
        batches = {d: self.stream.arrivals(d, self._seen[d], until) for d in devices}
        known = self._measure({d: _model(woken[d]) for d, batch in batches.items() if len(batch)}, batches)
        for d, batch in batches.items():
            stop = self.stream.position(d, until)
            rounds = self.stream.rounds(d, stop - len(batch), stop).astype(np.float64)
            outcome = woken[d].take_in(batch, rounds, known.get(d))
            self._seen[d] = until
            for watch in self.watchers:
                watch(d, batch, outcome)
        return sum(map(len, batches.values()))

    def take_part(
        self, orders: Mapping[DeviceId, TrainOrder], corrections: Mapping[DeviceId, Vector]
    ) -> dict[DeviceId, Report]:
        """Lets the devices follow their orders, training all of them in one call (steps 5, 6).

        What is stored one local step ahead is measured in one call, too, for all whose steps are mended.
        """
        devices = {d: self.device(d) for d in orders}
        batches = {d: device.follow(orders[d]) for d, device in devices.items()}
        before, after = self._measure_stored(orders, {d: batch for d, batch in batches.items() if len(batch)})
        drafts = {d: device.draft(orders[d], before.get(d), after.get(d)) for d, device in devices.items()}
        models = {d: model for d, draft in drafts.items() if (model := draft.ahead) is not None}
        ahead = self._measure(models, {d: draft.job.batch for d, draft in drafts.items()})
        prepared = {d: devices[d].look_ahead(draft, ahead.get(d)) for d, draft in drafts.items()}
        jobs = {d: _corrected(p.job, corrections.get(d)) for d, p in prepared.items() if len(p.job.batch)}
        trained: dict[DeviceId, Vector] = {}
        if jobs:
            order = orders[next(iter(jobs))]
            trained = dict(
                zip(jobs, self.learner.train_many(order.model, list(jobs.values()), order.local), strict=True)
            )
        return {
            d: devices[d].complete(each, trained.get(d, each.order.model), after.get(d)) for d, each in prepared.items()
        }

    def adopt(self, devices: Sequence[DeviceId], model: Vector, direction: Vector) -> None:
        """Gives devices a new model and direction outside of a round, as only an oracle can."""
        stored = {d: self.device(d).store.stored().batch for d in devices}
        measured = self._measure_together(model, {d: batch for d, batch in stored.items() if len(batch)})
        for d in devices:
            self.device(d).adopt(model, direction, measured.get(d))

    def snapshot(self) -> State:
        seen = np.array([[d, self._seen[d]] for d in sorted(self._seen)], dtype=np.int64).reshape(-1, 2)
        return {"seen": seen} | put_numbered({d: device.snapshot() for d, device in self.devices.items()})

    def restore(self, state: State) -> None:
        self.devices, self._seen = {}, {}
        parts = take_numbered(state)
        for d, seen in state["seen"].tolist():
            self.device(d).restore(parts[d])
            self._seen[d] = seen

    def _measure_stored(
        self, orders: Mapping[DeviceId, TrainOrder], filled: dict[DeviceId, Batch]
    ) -> tuple[Mapping[DeviceId, Measurements], Mapping[DeviceId, Measurements]]:
        """What is stored, under the models that the participants have (for gists alone) and are about to adopt."""
        if not filled:
            return {}, {}
        first = next(iter(filled))
        if self.device(first).gist is None:
            return {}, self._measure_together(orders[first].model, filled)
        before = self._measure({d: _model(self.device(d)) for d in filled}, filled)
        return before, self._measure(dict.fromkeys(filled, orders[first].model), filled)

    def _measure(
        self, models: Mapping[DeviceId, Vector], batches: Mapping[DeviceId, Batch]
    ) -> dict[DeviceId, Measurements]:
        """The batch of each device that has a model here, all in one call if any is asked for."""

        @cache
        def together() -> dict[DeviceId, Measurements]:
            measured = self.learner.measure_many(list(models.values()), [batches[d] for d in models])
            return dict(zip(models, measured, strict=True))

        return {d: Deferred(partial(lambda d: together()[d], d)) for d in models}

    def _measure_together(self, model: Vector, filled: dict[DeviceId, Batch]) -> dict[DeviceId, SliceOf]:
        """Batches under one model, measured as one batch if any is asked for."""
        probe = self.learner.probe(model)
        whole = Deferred(lambda: probe.measure(Batch.concatenate(list(filled.values()))))
        stops = np.cumsum([0, *map(len, filled.values())]).tolist()
        return {d: SliceOf(whole, slice(i, j)) for d, i, j in zip(filled, stops, stops[1:], strict=False)}


def _corrected(job: Job, correction: Vector | None) -> Job:
    """With one more correction of the local steps."""
    if correction is None:
        return job
    return replace(job, correction=correction if job.correction is None else job.correction + correction)


def _model(device: Device) -> Vector:
    if device.model is None:
        raise RuntimeError("a simulated device has a model from the start")
    return device.model
