"""The simulated devices: made when first needed, brought up to date when selected.

And what no real fleet has: unlimited storage (FD), all data in one place (CL of Theorem 2), and
exact gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import cast

import numpy as np

from fedkeep.config.experiment import Experiment
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.gradient_exchange import GradientExchange
from fedkeep.core.gradients.codec import Encoding
from fedkeep.core.participation import Participation
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

    A device's model and direction change only when it takes part, so one large batch under its last
    model, just before it takes part, gives what valuing every sample as it came would have given.

    >>> from fedkeep.sim.assembly import simulation_context
    >>> from fedkeep.config.experiment import resolve
    >>> context = simulation_context(resolve({"task": {"name": "demo", "devices": 3}}))
    >>> fleet = SimulatedFleet(context.learner, context.stream, context.device)
    >>> fleet.catch_up([0], until=20) == len(context.stream.arrivals(0, 0, 20))
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
        """Give the device, made when it is first asked for."""
        if device not in self.devices:
            self.devices[device], self._seen[device] = self._make(device), 0
        return self.devices[device]

    def catch_up(self, devices: Sequence[DeviceId], until: int) -> int:
        """Let the devices see what arrived before round `until`; gives the number of samples."""
        if self.stream.late:
            return sum(self._catch_up_late(d, until) for d in devices)
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

    def _catch_up_late(self, number: DeviceId, until: int) -> int:
        """Let a device see a stream of which labels come later, or never; round by round.

        The order of samples and labels decides which of them meet, so that nothing is taken
        together that came apart.
        """
        device, stream, arrived = self.device(number), self.stream, 0
        for round_ in range(self._seen[number], until):
            batch = stream.arrivals(number, round_, round_ + 1)
            arrived += len(batch)
            self._arrive(number, device, batch, round_)
            due = stream.labels_due(number, round_)
            if len(due) and stream.delayed:
                device.label(due.ids, due.y, float(round_))
        self._seen[number] = max(until, self._seen[number])
        return arrived

    def _arrive(self, number: DeviceId, device: Device, batch: Batch, round_: int) -> None:
        """Let samples arrive of one round: with their labels, or to wait for them."""
        known = np.zeros(len(batch), dtype=bool)
        if not self.stream.delayed:
            known = self.stream.labelled(batch.ids)
        starts = [0, *(np.flatnonzero(np.diff(known)) + 1).tolist(), len(batch)]
        for start, stop in pairwise(starts):
            part = batch.take(slice(start, stop))
            if not len(part):
                continue
            if known[start]:
                outcome = device.ingest(part, float(round_), device.measure(part))
                for watch in self.watchers:
                    watch(number, part, outcome)
            elif device.waiting is not None:
                device.wait(part.x, part.ids, float(round_))

    def take_part(
        self, orders: Mapping[DeviceId, TrainOrder], corrections: Mapping[DeviceId, Vector]
    ) -> dict[DeviceId, Report]:
        """Let the devices follow their orders, training all of them in one call (steps 5 and 6).

        What is stored is measured in one call, too, between the steps of each device's
        `Participation`: under the models that the devices have and the order's, and one local step
        ahead.

        Parameters
        ----------
        orders : mapping of DeviceId to TrainOrder
            The orders of one round, all with the same model.
        corrections : mapping of DeviceId to Vector
            What a baseline adds to the gradient of each device's local steps.

        Returns
        -------
        dict of DeviceId to Report
            What the devices report.
        """
        running = {d: Participation(self.device(d), order) for d, order in orders.items()}
        for participation in running.values():
            participation.begin()
        batches = {d: p.job.batch for d, p in running.items() if len(p.job.batch)}
        before, after = self._measure_stored({d: running[d] for d in batches}, batches)
        probe = self.learner.probe(next(iter(orders.values())).model) if orders else None
        for d, participation in running.items():
            participation.correct(before.get(d), after.get(d), probe)
        next_models = {d: m for d, p in running.items() if (m := p.next_model) is not None}
        ahead = self._measure(next_models, batches)
        for d, participation in running.items():
            participation.look_ahead(ahead.get(d))
        trained = self._train({d: running[d] for d in batches}, corrections)
        return {d: p.finish(trained.get(d, p.order.model)) for d, p in running.items()}

    def _measure_stored(
        self, running: Mapping[DeviceId, Participation], batches: dict[DeviceId, Batch]
    ) -> tuple[Mapping[DeviceId, PerSampleGradients], Mapping[DeviceId, PerSampleGradients]]:
        """Measure what is stored under each device's model, where a gist needs it, and the order's.

        Without gists what is stored is only scored: then one batch serves all devices.
        """
        if not running:
            return {}, {}
        first = next(iter(running.values()))
        if first.device.gist is None:
            return {}, self._measure_together(first.order.model, batches)
        models = {d: cast("Vector", p.device.model) for d, p in running.items()}
        before = self._measure(models, batches)
        return before, self._measure(dict.fromkeys(running, first.order.model), batches)

    def _train(
        self, running: Mapping[DeviceId, Participation], corrections: Mapping[DeviceId, Vector]
    ) -> dict[DeviceId, Vector]:
        """Train all devices that have something stored, in one call."""
        if not running:
            return {}
        jobs = {d: p.job for d, p in running.items()}
        for d in jobs.keys() & corrections.keys():
            own = jobs[d].correction
            added = corrections[d] if own is None else own + corrections[d]
            jobs[d] = replace(jobs[d], correction=added)
        order = next(iter(running.values())).order
        models = self.learner.train_many(order.model, list(jobs.values()), order.local)
        return dict(zip(jobs, models, strict=True))

    def update_model(
        self, devices: Sequence[DeviceId], model: Vector, global_gradient: Vector
    ) -> None:
        """Give devices a new model and g_hat outside of a round, as only an oracle can."""
        stored = {d: self.device(d).store.stored().batch for d in devices}
        filled = {d: batch for d, batch in stored.items() if len(batch)}
        measured = self._measure_together(model, filled)
        for d in devices:
            self.device(d).update_model(model, global_gradient, measured.get(d))

    def snapshot(self) -> State:
        """Take the state as plain arrays."""
        seen = np.array([[d, self._seen[d]] for d in sorted(self._seen)], dtype=np.int64).reshape(
            -1, 2
        )
        return {"seen": seen} | put_numbered(
            {d: device.snapshot() for d, device in self.devices.items()}
        )

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        self.devices, self._seen = {}, {}
        parts = take_numbered(state)
        for d, seen in state["seen"].tolist():
            self.device(d).restore(parts[d])
            self._seen[d] = seen

    def _measure(
        self, models: Mapping[DeviceId, Vector], batches: Mapping[DeviceId, Batch]
    ) -> dict[DeviceId, PerSampleGradients]:
        """Measure the batch of each device that has a model here, in one call if any is needed."""

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
        """Measure batches under one model, as one batch if any is asked for."""
        probe = self.learner.probe(model)
        whole = deferred(lambda: probe.measure(Batch.concatenate(list(filled.values()))))
        stops = np.cumsum([0, *map(len, filled.values())]).tolist()
        return {
            d: slice_of(whole, slice(i, j))
            for d, i, j in zip(filled, stops, stops[1:], strict=False)
        }


class FullFleet:
    """Devices with unlimited storage: they train on all their data, weighed by their rates.

    With a shared gist, which here is the exact gradient, they correct the drift between devices.

    Parameters
    ----------
    learner : FleetLearner
        What measures and trains.
    stream : Stream
        The devices' data.
    exchange : GradientExchange
        What devices and server tell each other of gradients.
    drift_weight : float
        How far steps turn from the device's gradient to the fleet's.
    seed : int
        The seed of mini-batches.
    so_far : bool
        Train on what has come so far, not on all that will ever come.
    """

    def __init__(
        self,
        learner: FleetLearner,
        stream: Stream,
        exchange: GradientExchange,
        drift_weight: float,
        seed: int,
        *,
        so_far: bool,
    ) -> None:
        self._learner, self._stream, self._exchange = learner, stream, exchange
        self._drift_weight, self._seed, self._so_far = drift_weight, seed, so_far

    def take_part(
        self, orders: Mapping[DeviceId, TrainOrder], corrections: Mapping[DeviceId, Vector]
    ) -> dict[DeviceId, Report]:
        """Let the devices follow their orders (steps 5 and 6)."""
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
        gradient = None
        if self._exchange.corrects_drift:
            gradient = learner.probe(order.model).measure(batch).mean_gradient()
            fleet = self._exchange.fleet_gradient(order)
            if fleet is not None:
                drift = np.float32(self._drift_weight) * (fleet - gradient)
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
    """Exact gradients, over all samples or a fixed seeded subset."""

    def __init__(self, learner: Learner, data: Federation, samples: int | None, seed: int) -> None:
        self._learner, self._data = learner, data
        self._ids = np.sort(data.train.indices)
        if samples is not None and samples < len(self._ids):
            self._ids = np.sort(generator(seed, "oracle").choice(self._ids, samples, replace=False))

    def gradient(self, model: Vector, ids: IntArray | None = None) -> Vector:
        """Average the gradients of these samples; without them of all, the global gradient."""
        ids = self._ids if ids is None else ids
        probe = self._learner.probe(model)
        total = np.zeros(self._learner.gradient_size)
        for start in range(0, len(ids), _CHUNK):
            part = self._data.take(ids[start : start + _CHUNK])
            total += probe.measure(part).mean_gradient().astype(np.float64) * len(part)
        return (total / len(ids)).astype(np.float32)


class DeviceMechanisms:
    """The privacy mechanisms of simulated devices; their ledgers are part of the state."""

    def __init__(self, experiment: Experiment) -> None:
        """Options under which the guarantee would not hold are refused."""
        options, estimator = experiment.privacy, experiment.estimator
        refuse_conflicts(options, experiment.aggregation)
        if options.protects("estimator") and "exact" in (estimator.name, estimator.cold_start):
            raise ConfigError(
                "estimator 'exact' shows the server gradients without noise:"
                " not with privacy.epsilon"
            )
        if options.protects("estimator") and options.unit == "sample":
            experiment.exchange.check_sample_privacy()
        self._options, self._seed = options, experiment.seed
        gist = experiment.gist
        self._encoding: Encoding = gist.used_encoding if gist.kept else "float32"
        self._guards: dict[DeviceId, DPMechanism] = {}

    def release(
        self, orders: Mapping[DeviceId, TrainOrder], reports: Mapping[DeviceId, Report]
    ) -> dict[DeviceId, Report]:
        """Give what leaves the devices; those whose budget is spent may send nothing."""
        if self._options.epsilon is None:
            return dict(reports)
        sent = {}
        for device, report in reports.items():
            with suppress(BudgetSpentError):
                sent[device] = self._guard(device, report.round).release(report, orders[device])
        return sent

    def release_profiles(self, profiles: Mapping[DeviceId, Profile]) -> dict[DeviceId, Profile]:
        """Give what the devices declare before the first round, as if counted over one."""
        if not self._options.protects("profile"):
            return dict(profiles)
        return {
            d: self._guard(d, -1).release_profile(profile, window=1.0)
            for d, profile in profiles.items()
        }

    def most_spent(self) -> Spending | None:
        """Find the ledger of the device that has spent most; None without accounting."""
        return max(
            (guard.spending() for guard in self._guards.values()),
            key=lambda s: s.spent,
            default=None,
        )

    def snapshot(self) -> State:
        """Take the state as plain arrays."""
        return put_numbered({device: guard.snapshot() for device, guard in self._guards.items()})

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        self._guards = {}
        for device, own in take_numbered(state).items():
            self._guard(device, -1).restore(own)

    def _guard(self, device: DeviceId, round_: int) -> DPMechanism:
        """Give the device's mechanism; its noise depends on seed, device and round alone."""
        if device not in self._guards:
            self._guards[device] = DPMechanism(
                self._options, PrivacyLedger(), lambda _: None, encoding=self._encoding
            )
        self._guards[device].normal = generator(
            self._seed, "privacy", device, round_
        ).standard_normal
        return self._guards[device]
