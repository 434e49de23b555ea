"""A device of the fleet: values what arrives, keeps the best, trains when asked (steps 3-6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from fedkeep.core.estimators import LocalGradientEstimator
from fedkeep.core.memory import Memory
from fedkeep.core.orders import screen_order
from fedkeep.core.policy import SelectionPolicy, View
from fedkeep.core.ports import Job, Kept, Learner, Measurements, Outcome, Probe, Store
from fedkeep.core.regions import Regions
from fedkeep.core.screening import screen_samples
from fedkeep.core.seeds import child_seed, uniform_keys
from fedkeep.core.slices import SliceOf
from fedkeep.core.start import BalancedStart
from fedkeep.core.types import (
    Assignment,
    Batch,
    FloatArray,
    IntArray,
    Profile,
    Report,
    Scores,
    State,
    TrainOrder,
    Vector,
)
from fedkeep.core.velocity import Meter
from fedkeep.core.weighting import Weighting


@dataclass(frozen=True)
class DeviceOptions:
    """How a device treats what it has stored."""

    revalue: bool = True
    """Score stored samples anew whenever a new model and g_hat arrive."""
    max_age: int | None = None
    """Arrivals after which a stored sample makes way for any newcomer; None: never."""
    gradient_from: Literal["arrivals", "stored"] = "arrivals"
    """What g_hat_c is a mean over; `stored` is the ablation without a local estimator."""

    def __post_init__(self) -> None:
        if self.max_age is not None and self.max_age < 1:
            raise ValueError(f"max_age must be 1 or more arrivals, got {self.max_age}")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A participation up to the training itself: what to train on, and what the device will say of its stream."""

    order: TrainOrder
    job: Job
    local_gradient: Vector | None
    gradient_samples: int


class Device:
    """One device; its model and direction change only when it takes part, so it may catch up on its stream late."""

    def __init__(
        self,
        *,
        learner: Learner,
        policy: SelectionPolicy,
        store: Store,
        regions: Regions,
        meter: Meter,
        capacity: int,
        sample_shape: tuple[int, ...],
        labels: int,
        weighting: Weighting = Weighting(),  # noqa: B008 - frozen
        options: DeviceOptions = DeviceOptions(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        self.learner, self.policy, self.store = learner, policy, store
        self.regions, self.meter, self.weighting = regions, meter, weighting
        self.capacity, self.options, self.seed = capacity, options, seed
        self._shape, self._labels = sample_shape, labels
        self._memory = Memory()
        self._estimator = LocalGradientEstimator(learner.gradient_size if policy.uses_direction else 0)
        self._estimates = policy.uses_direction and options.gradient_from == "arrivals"
        self._probe: Probe | None = None
        self._model: Vector | None = None
        self._direction: Vector | None = None
        self._assignment: Assignment | None = None
        self._declared: FloatArray | None = None
        self._start = BalancedStart(regions.count)
        self._arrivals = 0
        self._round = -1

    @property
    def model(self) -> Vector | None:
        """The model last received; None before the first."""
        return self._model

    @property
    def direction(self) -> Vector | None:
        return self._direction

    def install(self, model: Vector, direction: Vector | None = None) -> None:
        """Takes a first model, so that arrivals can be measured before the device first takes part."""
        self._model, self._direction = model, direction
        self._probe = self.learner.probe(model)

    def assign(self, assignment: Assignment) -> None:
        """Follows a plan: which regions to store, how many of each, what each sample counts (step 2)."""
        self._assignment = assignment
        quotas = assignment.quotas
        self.store.configure(np.full_like(quotas, np.iinfo(np.int64).max) if self.policy.unbounded else quotas)

    def profile(self) -> Profile:
        """What the device declares to the server (step 1), and weighs itself by until it declares anew.

        The plan rests on what was declared: a weight by any other rate would be cut, or count for too much.
        """
        self._declared = self.meter.velocity()
        return Profile(self.capacity, self._declared)

    def observe(self, batch: Batch, time: float) -> tuple[Outcome, Counter[str]]:
        """Takes in arrivals up to `time`: the fates of the sound samples, and the unsound ones by reason."""
        sound, refused = screen_samples(batch.x, batch.y, self._shape, self._labels)
        clean = batch if sound.all() else batch.take(sound)
        if clean.y.dtype.kind == "f":  # whole numbers all the same, or they would not be sound
            clean = Batch(clean.x, clean.y.astype(np.int64), clean.ids)
        return self.take_in(clean, time, self.measure(clean)), refused

    def measure(self, batch: Batch) -> Measurements | None:
        """The batch under the model last received; None before there is one."""
        return None if self._probe is None or not len(batch) else self._probe.measure(batch)

    def take_in(self, batch: Batch, time: float, measurements: Measurements | None) -> Outcome:
        """Takes in sound samples that have been measured: all count for g_hat_c, the best are stored."""
        if not len(batch):
            return Outcome.of_none()
        regions = self.regions.assign(batch, measurements)
        self.meter.observe(regions, time)
        if measurements is not None and self._estimates:
            self._estimator.add(measurements, len(batch))
        if self._assignment is None:
            return self._take_in_unplanned(batch, regions)
        return self._offer(batch, regions, measurements)

    def participate(self, order: TrainOrder) -> Report:
        """Trains on what is stored and reports (steps 5, 6)."""
        prepared = self.prepare(order)
        return self.complete(prepared, self.learner.train(order.model, prepared.job, order.local))

    def screen(self, order: TrainOrder) -> None:
        """Raises where an order does not fit this device; to be asked before anything of it is followed."""
        screen_order(order, self.learner.size, self.learner.gradient_size, self.regions.count, self.capacity)

    def prepare(self, order: TrainOrder) -> Prepared:
        """Follows an order up to the training itself, which a caller may do for many devices at once."""
        self._estimator.settle(order.accepted_round)
        gradient, count = self._estimator.freeze(order.round)
        if order.assignment is not None:
            self.assign(order.assignment)
        stored = self.store.stored()
        if self.options.gradient_from == "stored" and len(stored.batch):
            gradient = self.learner.probe(order.model).measure(stored.batch).mean_gradient()
            count = len(stored.batch)
        job = Job(stored.batch, self._weights(stored.regions), child_seed(self.seed, "train", order.round))
        return Prepared(order, job, gradient, count)

    def complete(self, prepared: Prepared, trained: Vector, stored: Measurements | None = None) -> Report:
        """Adopts the order's model and reports; `stored` is what is stored as measured under that model, if known."""
        order, job = prepared.order, prepared.job
        n = len(job.batch)
        if order.round != self._round:
            self.store.mark_used(job.batch.ids)
        self._round = order.round
        self.adopt(order.model, order.direction, stored)
        per_epoch = -(-n // order.local.batch_size) if order.local.batch_size else min(n, 1)
        return Report(
            round=order.round,
            model=trained if n else order.model,
            weight=float(job.weights.sum()),
            steps=order.local.epochs * per_epoch,
            samples=n,
            local_gradient=prepared.local_gradient,
            gradient_samples=prepared.gradient_samples,
        )

    def adopt(self, model: Vector, direction: Vector | None, stored: Measurements | None = None) -> None:
        """Takes a new model and direction, and re-values what is stored under them."""
        first_direction = self._direction is None and direction is not None
        self.install(model, direction)
        if self.options.revalue or first_direction:
            self._revalue(stored)
        if self.options.max_age is not None:
            self.store.expire(self._arrivals - self.options.max_age)

    def snapshot(self) -> State:
        """All that the device knows, as plain arrays."""
        state = {f"{part}.{name}": array for part, of in self._parts() for name, array in of.snapshot().items()}
        state["counters"] = np.array([self._arrivals, self._round])
        for name, vector in (("model", self._model), ("direction", self._direction)):
            if vector is not None:
                state[name] = vector
        if self._declared is not None:
            state["declared"] = self._declared
        if self._assignment is not None:
            state["assignment.quotas"] = self._assignment.quotas
            state["assignment.label_weights"] = self._assignment.label_weights
            state["assignment.mass_per_slot"] = np.array(self._assignment.mass_per_slot)
        return state

    def restore(self, state: State) -> None:
        """Becomes the device that `snapshot` described."""
        for part, of in self._parts():
            of.restore({n.removeprefix(f"{part}."): a for n, a in state.items() if n.startswith(f"{part}.")})
        self._arrivals, self._round = state["counters"].tolist()
        self._declared = state.get("declared")
        self._assignment = None
        if "assignment.quotas" in state:
            names = ("quotas", "label_weights", "mass_per_slot")
            quotas, weights, mass = (state[f"assignment.{name}"] for name in names)
            self._assignment = Assignment(quotas, weights, float(mass))
        self._model = self._direction = self._probe = None
        if "model" in state:
            self.install(state["model"], state.get("direction"))

    def _weights(self, regions: IntArray) -> FloatArray:
        """What each stored sample counts; all alike before there is a plan."""
        if self._assignment is None:
            return np.ones(len(regions))
        velocity = self.meter.velocity() if self._declared is None else self._declared
        return self.weighting.weigh(regions, self._assignment, velocity).values

    def _parts(self) -> tuple[tuple[str, Kept], ...]:
        return (
            ("store", self.store),
            ("meter", self.meter),
            ("memory", self._memory),
            ("estimator", self._estimator),
            ("start", self._start),
        )

    def _offer(self, batch: Batch, regions: IntArray, measurements: Measurements | None) -> Outcome:
        if not self.policy.sequential or len(batch) <= 1:
            return self._offer_at_once(batch, regions, measurements)
        each = [
            self._offer_at_once(
                batch.take(slice(i, i + 1)),
                regions[i : i + 1],
                None if measurements is None else SliceOf(measurements, slice(i, i + 1)),
            )
            for i in range(len(batch))
        ]
        return Outcome.concatenate(each)

    def _offer_at_once(self, batch: Batch, regions: IntArray, measurements: Measurements | None) -> Outcome:
        arrivals = self._arrivals + np.arange(len(batch))
        self._arrivals += len(batch)
        scores = self._score(batch, measurements, arrivals, partial(uniform_keys, self.seed, arrivals))
        return self.store.offer(batch, regions, scores, arrivals)

    def _score(
        self,
        batch: Batch,
        measurements: Measurements | None,
        arrivals: IntArray,
        keys: Callable[[], Scores],
        previous: Scores | None = None,
    ) -> Scores:
        """The policy's scores; random keys while there is no model to measure with."""
        if measurements is None:
            return keys()
        stored_ids = self.store.stored().batch.ids if self.policy.sequential else np.empty(0, dtype=np.int64)
        view = View(measurements, self._direction, arrivals, keys, stored_ids, self.capacity, self._memory, previous)
        return self.policy.score(batch, view)

    def _revalue(self, measurements: Measurements | None) -> None:
        stored = self.store.stored()
        if not len(stored.batch):
            return
        keys = partial(uniform_keys, child_seed(self.seed, "revalue", self._round), stored.batch.ids)
        measured = measurements if measurements is not None else self.measure(stored.batch)
        self.store.revalue(self._score(stored.batch, measured, stored.arrivals, keys, stored.scores))

    def _take_in_unplanned(self, batch: Batch, regions: IntArray) -> Outcome:
        """Before there is a plan: a reservoir whose slots are divided evenly among the regions seen so far."""
        parts = []
        for start, stop in self._start.between_sightings(regions):
            self._start.see(regions[start:stop])
            self.store.configure(self._start.quotas(self.capacity))
            parts.append(self._offer(batch.take(slice(start, stop)), regions[start:stop], None))
        return Outcome.concatenate(parts)
