"""The simulated devices: made when first needed, brought up to date when selected."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from fedkeep.core.device import Device, Prepared
from fedkeep.core.plan import Plan
from fedkeep.core.ports import FleetLearner, Job, Measurements, Outcome
from fedkeep.core.slices import deferred, slice_of
from fedkeep.core.state import put_numbered, take_numbered
from fedkeep.core.types import Batch, DeviceId, Profile, Report, State, TrainOrder, Vector
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
        woken = [self.device(d) for d in devices]
        batches = [self.stream.arrivals(d, self._seen[d], until) for d in devices]
        busy = [i for i, batch in enumerate(batches) if len(batch)]
        measured = self._measure([_model(woken[i]) for i in busy], [batches[i] for i in busy])
        known = dict(zip(busy, measured, strict=True))
        for i, (d, device, batch) in enumerate(zip(devices, woken, batches, strict=True)):
            stop = self.stream.position(d, until)
            rounds = self.stream.rounds(d, stop - len(batch), stop).astype(np.float64)
            outcome = device.take_in(batch, rounds, known.get(i))
            self._seen[d] = until
            for watch in self.watchers:
                watch(d, batch, outcome)
        return sum(map(len, batches))

    def declare(self) -> dict[DeviceId, Profile]:
        """What the devices have counted on their streams so far."""
        return {d: device.profile() for d, device in sorted(self.devices.items())}

    def assign(self, plan: Plan) -> None:
        """Tells every device of a new plan."""
        for d, device in self.devices.items():
            device.assign(plan.assignment(d))

    def take_part(
        self, orders: Mapping[DeviceId, TrainOrder], corrections: Mapping[DeviceId, Vector]
    ) -> dict[DeviceId, Report]:
        """Lets the devices follow their orders, training all of them in one call (steps 5, 6)."""
        batches = {d: self.device(d).follow(order) for d, order in orders.items()}
        before, after = self._measure_stored(orders, batches)
        drafts = {d: self.device(d).draft(order, before.get(d), after.get(d)) for d, order in orders.items()}
        prepared = self._look_ahead(drafts)
        trained = self._train({d: each for d, each in prepared.items() if len(each.job.batch)}, corrections)
        return {
            d: self.device(d).complete(each, trained.get(d, each.order.model), after.get(d))
            for d, each in prepared.items()
        }

    def adopt(self, devices: Sequence[DeviceId], model: Vector, direction: Vector) -> None:
        """Gives devices a new model and direction outside of a round, as only an oracle can."""
        stored = {d: self.device(d).store.stored().batch for d in devices}
        measured = self._measure_together(model, stored)
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

    def _measure(self, models: Sequence[Vector], batches: Sequence[Batch]) -> list[Measurements]:
        """Each batch under its own model, all in one call if any is asked for."""

        @cache
        def together() -> Sequence[Measurements]:
            return self.learner.measure_many(models, batches)

        return [deferred(partial(lambda i: together()[i], i)) for i in range(len(batches))]

    def _look_ahead(self, drafts: dict[DeviceId, Prepared]) -> dict[DeviceId, Prepared]:
        """Measures what is stored one local step ahead, for all whose steps are mended in one call."""
        models = {d: model for d, draft in drafts.items() if (model := draft.ahead) is not None}
        ahead = self._measure(list(models.values()), [drafts[d].job.batch for d in models])
        measured = dict(zip(models, ahead, strict=True))
        return {d: self.device(d).look_ahead(draft, measured.get(d)) for d, draft in drafts.items()}

    def _train(
        self, prepared: dict[DeviceId, Prepared], corrections: Mapping[DeviceId, Vector]
    ) -> dict[DeviceId, Vector]:
        if not prepared:
            return {}
        order = next(iter(prepared.values())).order
        jobs = [_corrected(each.job, corrections.get(d)) for d, each in prepared.items()]
        models = self.learner.train_many(order.model, jobs, order.local)
        return dict(zip(prepared, models, strict=True))

    def _measure_stored(
        self, orders: Mapping[DeviceId, TrainOrder], batches: dict[DeviceId, Batch]
    ) -> tuple[Mapping[DeviceId, Measurements], Mapping[DeviceId, Measurements]]:
        """What is stored, under the models that the participants have (for gists alone) and are about to adopt."""
        filled = [d for d, batch in batches.items() if len(batch)]
        if not filled:
            return {}, {}
        order = orders[filled[0]]
        if self.device(filled[0]).gist is None:
            return {}, self._measure_together(order.model, batches)
        devices, own = [self.device(d) for d in filled], [batches[d] for d in filled]
        before = self._measure([_model(device) for device in devices], own)
        after = self._measure([order.model] * len(filled), own)
        return dict(zip(filled, before, strict=True)), dict(zip(filled, after, strict=True))

    def _measure_together(self, model: Vector, batches: dict[DeviceId, Batch]) -> dict[DeviceId, Measurements]:
        """Batches under one model, measured as one batch if any is asked for."""
        filled = {d: batch for d, batch in batches.items() if len(batch)}
        probe = self.learner.probe(model)
        whole = deferred(lambda: probe.measure(Batch.concatenate(list(filled.values()))))
        stops = np.cumsum([0, *(len(batch) for batch in filled.values())]).tolist()
        return {d: slice_of(whole, slice(i, j)) for d, i, j in zip(filled, stops, stops[1:], strict=False)}


def _corrected(job: Job, correction: Vector | None) -> Job:
    """With one more correction of the local steps."""
    if correction is None:
        return job
    return replace(job, correction=correction if job.correction is None else job.correction + correction)


def _model(device: Device) -> Vector:
    if device.model is None:
        raise RuntimeError("a simulated device has a model from the start")
    return device.model
