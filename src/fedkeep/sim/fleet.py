"""The simulated devices: made when first needed, brought up to date when selected.

And what no real fleet has: unlimited storage (FD), all data in one place (CL of Theorem 2), exact gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import cast

import numpy as np

from fedkeep.config.experiment import Experiment
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.gist import GistOptions
from fedkeep.core.protocols import FleetLearner, Learner, Outcome, PerSampleGradients, TrainingJob
from fedkeep.core.seeds import child_seed, generator
from fedkeep.core.slices import deferred, slice_of
from fedkeep.core.state import put_numbered, take_numbered
from fedkeep.core.types import Batch, DeviceId, IntArray, Profile, Report, State, TrainOrder, Vector
from fedkeep.data import Federation, Stream
from fedkeep.privacy.accountant import BudgetSpentError, PrivacyLedger
from fedkeep.privacy.mechanism import DPMechanism, Spending
from fedkeep.privacy.options import refuse_conflicts

_CHUNK = 4096
"""Samples of which an exact gradient is taken at a time."""


class SimulatedFleet:
    """Devices that catch up on their streams only when somebody asks.

    A device's model and direction change only when it takes part, so one large batch under its last model, just
    before it takes part, gives what valuing every sample as it came would have given.

    >>> from fedkeep.sim.assembly import simulation_context
    >>> from fedkeep.config.experiment import resolve
    >>> ground = simulation_context(resolve({"task": {"name": "demo", "devices": 3}}))
    >>> fleet = SimulatedFleet(ground.learner, ground.stream, ground.device)
    >>> fleet.catch_up([0], until=20) == len(ground.stream.arrivals(0, 0, 20))
    True
    >>> sorted(fleet.devices)  # nobody has asked for the others yet
    [0]
    """

    def __init__(
        self, learner: FleetLearner, stream: Stream, make: Callable[[DeviceId], Device]
    ) -> None:
        self.learner, self.stream = learner, stream
        self.devices: dict[DeviceId, Device] = {}
        self.watchers: list[Callable[[DeviceId, Batch, Outcome], None]] = []
        self._make = make
        self._seen: dict[DeviceId, int] = {}

    def device(self, device: DeviceId) -> Device:
        """The device, made if this is the first anybody hears of it."""
        if device not in self.devices:
            self.devices[device], self._seen[device] = self._make(device), 0
        return self.devices[device]

    def catch_up(self, devices: Sequence[DeviceId], until: int) -> int:
        """Lets the devices see all that arrived before round `until`; returns how many samples that was."""
        woken = {d: self.device(d) for d in devices}
        batches = {d: self.stream.arrivals(d, self._seen[d], until) for d in devices}
        models = {d: cast("Vector", woken[d].model) for d, batch in batches.items() if len(batch)}
        known = self._measure(models, batches)
        for d, batch in batches.items():
            stop = self.stream.position(d, until)
            rounds = self.stream.rounds(d, stop - len(batch), stop).astype(np.float64)
            outcome = woken[d].ingest(batch, rounds, known.get(d))
            self._seen[d] = until
            for watch in self.watchers:
                watch(d, batch, outcome)
        return sum(map(len, batches.values()))

    def take_part(
        self, orders: Mapping[DeviceId, TrainOrder], corrections: Mapping[DeviceId, Vector]
    ) -> dict[DeviceId, Report]:
        """Lets the devices follow their orders, training all of them in one call (steps 5, 6).

        What is stored is measured in one call, too, under the models that devices are about to adopt; for gists, also
        under those that they have, and one local step ahead.
        """
        devices = {d: self.device(d) for d in orders}
        stored = {d: device.follow(orders[d]) for d, device in devices.items()}
        filled = {d: batch for d, batch in stored.items() if len(batch)}
        before: Mapping[DeviceId, PerSampleGradients] = {}
        after: Mapping[DeviceId, PerSampleGradients] = {}
        if filled:
            first = next(iter(filled))
            if devices[first].gist is None:
                after = self._measure_together(orders[first].model, filled)
            else:
                before = self._measure(
                    {d: cast("Vector", devices[d].model) for d in filled}, filled
                )
                after = self._measure(dict.fromkeys(filled, orders[first].model), filled)
        drafts = {
            d: device.draft(orders[d], before.get(d), after.get(d)) for d, device in devices.items()
        }
        next_models = {
            d: model for d, draft in drafts.items() if (model := draft.ahead) is not None
        }
        ahead = self._measure(next_models, {d: draft.job.batch for d, draft in drafts.items()})
        prepared = {d: devices[d].look_ahead(draft, ahead.get(d)) for d, draft in drafts.items()}
        trained: dict[DeviceId, Vector] = {}
        if jobs := {d: p.job for d, p in prepared.items() if len(p.job.batch)}:
            for d in jobs.keys() & corrections.keys():
                own = jobs[d].correction
                jobs[d] = replace(
                    jobs[d], correction=corrections[d] if own is None else own + corrections[d]
                )
            order = orders[next(iter(jobs))]
            models = self.learner.train_many(order.model, list(jobs.values()), order.local)
            trained = dict(zip(jobs, models, strict=True))
        return {
            d: devices[d].complete(p, trained.get(d, p.order.model), after.get(d))
            for d, p in prepared.items()
        }

    def adopt(self, devices: Sequence[DeviceId], model: Vector, direction: Vector) -> None:
        """Gives devices a new model and direction outside of a round, as only an oracle can."""
        stored = {d: self.device(d).store.stored().batch for d in devices}
        measured = self._measure_together(
            model, {d: batch for d, batch in stored.items() if len(batch)}
        )
        for d in devices:
            self.device(d).adopt(model, direction, measured.get(d))

    def snapshot(self) -> State:
        seen = np.array([[d, self._seen[d]] for d in sorted(self._seen)], dtype=np.int64).reshape(
            -1, 2
        )
        return {"seen": seen} | put_numbered(
            {d: device.snapshot() for d, device in self.devices.items()}
        )

    def restore(self, state: State) -> None:
        self.devices, self._seen = {}, {}
        parts = take_numbered(state)
        for d, seen in state["seen"].tolist():
            self.device(d).restore(parts[d])
            self._seen[d] = seen

    def _measure(
        self, models: Mapping[DeviceId, Vector], batches: Mapping[DeviceId, Batch]
    ) -> dict[DeviceId, PerSampleGradients]:
        """The batch of each device that has a model here, all in one call if any is asked for."""

        @cache
        def together() -> dict[DeviceId, PerSampleGradients]:
            measured = self.learner.measure_many(
                list(models.values()), [batches[d] for d in models]
            )
            return dict(zip(models, measured, strict=True))

        return {d: deferred(partial(lambda d: together()[d], d)) for d in models}

    def _measure_together(
        self, model: Vector, filled: dict[DeviceId, Batch]
    ) -> dict[DeviceId, PerSampleGradients]:
        """Batches under one model, measured as one batch if any is asked for."""
        probe = self.learner.probe(model)
        whole = deferred(lambda: probe.measure(Batch.concatenate(list(filled.values()))))
        stops = np.cumsum([0, *map(len, filled.values())]).tolist()
        return {
            d: slice_of(whole, slice(i, j))
            for d, i, j in zip(filled, stops, stops[1:], strict=False)
        }


class FullFleet:
    """Devices that train on all their data, or all that has come so far, in every round, weighed by its rate.

    With a shared gist, which here is the exact gradient, they have its correction of the drift between devices too.
    """

    def __init__(
        self, learner: FleetLearner, stream: Stream, gist: GistOptions, seed: int, *, so_far: bool
    ) -> None:
        self._learner, self._stream, self._gist = learner, stream, gist
        self._seed, self._so_far = seed, so_far

    def take_part(
        self, orders: Mapping[DeviceId, TrainOrder], corrections: Mapping[DeviceId, Vector]
    ) -> dict[DeviceId, Report]:
        return {d: self._report(d, order, corrections.get(d)) for d, order in orders.items()}

    def _report(self, device: DeviceId, order: TrainOrder, correction: Vector | None) -> Report:
        stream, learner, local = self._stream, self._learner, order.local
        batch = (
            stream.seen_before(device, order.round + 1)
            if self._so_far
            else stream.training_set(device)
        )
        n = len(batch)
        if not n:
            return Report(order.round, order.model, 0.0, 0, 0, None)
        gradient = (
            learner.probe(order.model).measure(batch).mean_gradient() if self._gist.shared else None
        )
        if gradient is not None and order.direction is not None:
            drift = np.float32(self._gist.drift_weight) * (order.direction - gradient)
            correction = drift if correction is None else correction + drift
        seed = child_seed(self._seed, "device", device, "train", order.round)
        model = learner.train(order.model, TrainingJob(batch, np.ones(n), seed, correction), local)
        steps = local.epochs * (-(-n // local.batch_size) if local.batch_size else 1)
        weight = (
            float(stream.rates[device]) / order.assignment.mass_per_slot
            if order.assignment
            else float(n)
        )
        return Report(order.round, model, weight, steps, n, gradient, n)


class Oracle:
    """Exact gradients of the global loss and of each device's, over all samples or a fixed seeded subset."""

    def __init__(self, learner: Learner, data: Federation, samples: int | None, seed: int) -> None:
        self._learner, self._data = learner, data
        self._ids = np.sort(data.train.indices)
        if samples is not None and samples < len(self._ids):
            self._ids = np.sort(generator(seed, "oracle").choice(self._ids, samples, replace=False))

    def gradient(self, model: Vector, ids: IntArray | None = None) -> Vector:
        """The mean gradient of these samples; without them the global one: every device weighs as many as it has."""
        ids = self._ids if ids is None else ids
        probe = self._learner.probe(model)
        total = np.zeros(self._learner.gradient_size)
        for start in range(0, len(ids), _CHUNK):
            part = self._data.take(ids[start : start + _CHUNK])
            total += probe.measure(part).mean_gradient().astype(np.float64) * len(part)
        return (total / len(ids)).astype(np.float32)


class DeviceMechanisms:
    """The guards of simulated devices, made as they have something to send; their ledgers are part of the state."""

    def __init__(self, experiment: Experiment) -> None:
        """Options under which the guarantee would not hold are refused."""
        options, estimator = experiment.privacy, experiment.estimator
        refuse_conflicts(options, experiment.aggregation)
        if options.protects("estimator") and "exact" in (estimator.name, estimator.cold_start):
            raise ConfigError(
                "estimator 'exact' shows the server gradients without noise: not with privacy.epsilon"
            )
        if (
            options.protects("estimator")
            and options.unit == "sample"
            and estimator.name == "stored"
        ):
            raise ConfigError(
                "estimator 'stored' sends a sample many times: use privacy.unit = 'device' with it"
            )
        self._options, self._seed = options, experiment.seed
        self._guards: dict[DeviceId, DPMechanism] = {}

    def release(
        self, orders: Mapping[DeviceId, TrainOrder], reports: Mapping[DeviceId, Report]
    ) -> dict[DeviceId, Report]:
        """What leaves the devices; those whose budget is spent may send nothing at all."""
        if self._options.epsilon is None:
            return dict(reports)
        sent = {}
        for device, report in reports.items():
            with suppress(BudgetSpentError):
                sent[device] = self._guard(device, report.round).release(report, orders[device])
        return sent

    def release_profiles(self, profiles: Mapping[DeviceId, Profile]) -> dict[DeviceId, Profile]:
        """What the devices declare before the first round, as if counted over one."""
        if not self._options.protects("profile"):
            return dict(profiles)
        return {
            d: self._guard(d, -1).release_profile(profile, window=1.0)
            for d, profile in profiles.items()
        }

    def most_spent(self) -> Spending | None:
        """The ledger of the device that has told most; None where nothing is accounted for."""
        return max(
            (guard.spending() for guard in self._guards.values()),
            key=lambda s: s.spent,
            default=None,
        )

    def snapshot(self) -> State:
        return put_numbered({device: guard.snapshot() for device, guard in self._guards.items()})

    def restore(self, state: State) -> None:
        self._guards = {}
        for device, own in take_numbered(state).items():
            self._guard(device, -1).restore(own)

    def _guard(self, device: DeviceId, round_: int) -> DPMechanism:
        """The device's guard; its noise depends on the seed, the device and the round alone: simulations repeat."""
        if device not in self._guards:
            self._guards[device] = DPMechanism(self._options, PrivacyLedger(), lambda _: None)
        self._guards[device].normal = generator(
            self._seed, "privacy", device, round_
        ).standard_normal
        return self._guards[device]
