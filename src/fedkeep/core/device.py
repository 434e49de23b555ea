"""A device of the fleet: values what arrives, keeps the best, trains when asked (steps 3-6)."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError
from fedkeep.core.estimators import GradientAccumulator, LocalGradientEstimator
from fedkeep.core.gist import Correction, Gist, GistOptions, StoredGradients
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.protocols import (
    GradientProbe,
    Learner,
    Outcome,
    PerSampleGradients,
    Stateful,
    Store,
    TrainingJob,
)
from fedkeep.core.regions import Regions, regions_for
from fedkeep.core.screening import screen_order, screen_samples
from fedkeep.core.seeds import child_seed
from fedkeep.core.selection import LabelFrequencies, Selection
from fedkeep.core.state import add_prefix, restore_parts, snapshot_parts, strip_prefix
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.types import (
    Assignment,
    Batch,
    FloatArray,
    IntArray,
    Profile,
    Report,
    State,
    TrainOrder,
    Vector,
)
from fedkeep.core.velocity import VelocityMeter
from fedkeep.core.weighting import UNCOORDINATED, Weighting, own_mass


@dataclass(frozen=True)
class StoreRules:
    """How a device treats what it has stored, and how slots are divided."""

    rescore: bool = True
    """Whether stored samples are scored anew whenever a new model and g_hat arrive."""
    max_age: int | None = None
    """Arrivals after which a stored sample makes way for any newcomer; None: never."""
    quotas: Literal["soft", "hard"] = "soft"
    """`soft`: regions borrow the free slots of regions that have not arrived; `hard` is the paper."""

    def __post_init__(self) -> None:
        check_range(self, "max_age", least=1)


@dataclass(frozen=True)
class DeviceOptions(StoreRules):
    """How a device treats what it has stored, and what it tells of its stream."""

    gradient_from: Literal["arrivals", "stored"] = "arrivals"
    """What g_hat_c is a mean over; `stored` is the ablation without a local estimator."""


@dataclass(eq=False)
class PendingUpdate:
    """A participation up to the training itself: what to train on, and what the device will say of its stream."""

    order: TrainOrder
    job: TrainingJob
    local_gradient: Vector | None
    gradient_samples: int
    mending: Correction | None = None
    """What the gist has to say of this participation; None without one."""
    stored: StoredGradients | None = None
    probe: GradientProbe | None = None
    """The order's model, where it has been measured with already."""

    @cached_property
    def ahead(self) -> Vector | None:
        """The model after one local step; None where there is nothing to mend, or no second step to come."""
        if self.stored is None or self.job.correction is None or self.steps < 2:
            return None
        step = self.stored.means[1] + self.job.correction
        step *= np.float32(self.order.local.learning_rate)
        model = self.order.model.copy()
        model[len(model) - len(step) :] -= step
        return model

    @property
    def steps(self) -> int:
        """Local steps to come."""
        n, local = len(self.job.batch), self.order.local
        return local.epochs * (-(-n // local.batch_size) if local.batch_size else min(n, 1))

    def mend(self, mending: Correction, valued: int) -> None:
        """Lets a gist add to each step, over all that is valued; it may cover the last layers alone."""
        correction = mending.correction
        if correction is not None and len(correction) < valued:
            correction = np.pad(correction, (valued - len(correction), 0))
        self.mending = mending
        self.job = replace(self.job, correction=correction)


class Device:
    """One device; its model and direction change only when it takes part, so it may catch up on its stream late.

    It keeps `capacity` samples by the policy; what is not given is as the policy needs it. A store of one's own follows
    its own rule: `after_use` is for the one in memory.

    >>> from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
    >>> from fedkeep.core.types import LocalTraining
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> learner = DenseLearner((2, 2))
    >>> device = Device(learner, BalancedReservoir(), capacity=2, sample_shape=(2,), labels=2, gist=GistOptions("local"))
    >>> device.set_model(learner.initial(0))
    >>> x = np.array([[0, 1], [1, 0], [1, 1], [np.nan, 0]], dtype=np.float32)
    >>> outcome, refused = device.observe(Batch(x, np.array([0, 1, 1, 0]), np.arange(4)), time=0.0)
    >>> dict(refused)  # a sample that holds NaN counts nowhere
    {'not-finite': 1}
    >>> report = device.participate(TrainOrder(0, learner.initial(1), None, LocalTraining(0.1, epochs=5)))
    >>> report.samples, report.steps, report.model.shape
    (2, 5, (6,))
    >>> device.gist.latest.worth > 2  # three samples came, and two are stored
    True
    """

    def __init__(
        self,
        learner: Learner,
        policy: SelectionPolicy,
        *,
        capacity: int,
        sample_shape: tuple[int, ...],
        labels: int,
        regions: Regions | None = None,
        store: Store | None = None,
        meter: VelocityMeter | None = None,
        after_use: AfterUse = AfterUse(),
        weighting: Weighting | None = None,
        options: DeviceOptions = DeviceOptions(),
        gist: GistOptions = GistOptions(),
        clip: float | None = None,
        seed: int = 0,
    ) -> None:
        self.learner, self.policy, self.options, self.seed = learner, policy, options, seed
        self.capacity, self._shape, self._labels, self._clip = capacity, sample_shape, labels, clip
        self.regions = regions or regions_for(policy, labels)
        self.meter = meter or VelocityMeter(self.regions.count)
        self.weighting = weighting or (Weighting() if policy.coordinated else UNCOORDINATED)
        none = np.zeros(self.regions.count, dtype=np.int64)
        self.store = (
            MemoryStore(none, after_use, bends=options.quotas == "soft") if store is None else store
        )
        if (
            gist.kept
            and gist.label_matching
            and self.regions.count > 1
            and self.weighting.client_label != 1
        ):
            raise ConfigError(
                "gist.label_matching needs weights by client and label: set weights.client_label = 1, or label_matching = false"
            )
        self.gist = (
            Gist(gist, learner.tail(gist.last_layers), seed, fair=policy.fair)
            if gist.kept
            else None
        )
        self._estimator = LocalGradientEstimator()
        self._tells = policy.uses_direction and not gist.shared
        """Whether g_hat_c is reported."""
        told = learner.gradient_size if self._tells and options.gradient_from == "arrivals" else 0
        seen = learner.gradient_size if gist.kept else told if clip is None else 0
        self.window = GradientAccumulator(seen, self.regions.count)
        """All arrivals since the model last changed."""
        self._told = (
            self.window if clip is None else GradientAccumulator(told, self.regions.count, clip)
        )
        """The same as far as it is told: with each sample's gradient shortened to `clip`, if there is one."""
        self._windows = [w for w in dict.fromkeys((self.window, self._told)) if w.size]
        self.model: Vector | None = None
        """The model last received; None before the first."""
        self._probe: GradientProbe | None = None
        self._declared: FloatArray | None = None
        shares = LabelFrequencies(self.regions.count, child_seed(seed, "turns"))
        self._selection = Selection(policy, self.store, capacity, shares, seed)
        self._round = -1
        parts: dict[str, Stateful | None] = {
            "store": self.store,
            "meter": self.meter,
            "estimator": self._estimator,
            "window": self.window,
            "shares": shares,
            "told": None if clip is None else self._told,
            "gist": self.gist,
        }
        self._parts = {name: part for name, part in parts.items() if part is not None}

    @property
    def direction(self) -> Vector | None:
        """The g_hat last received; None before the first."""
        return self._selection.direction

    def set_model(
        self, model: Vector, direction: Vector | None = None, probe: GradientProbe | None = None
    ) -> None:
        """Takes a first model, so that arrivals can be measured before the device first takes part."""
        self.model, self._selection.direction = model, direction
        self._probe = self.learner.probe(model) if probe is None else probe

    def assign(self, assignment: Assignment) -> None:
        """Follows a plan: which regions to store, how many of each, what each sample counts (step 2)."""
        self._selection.assign(assignment)

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
        return self.ingest(clean, time, self.measure(clean)), refused

    def measure(self, batch: Batch) -> PerSampleGradients | None:
        """The batch under the model last received; None before there is one."""
        return None if self._probe is None or not len(batch) else self._probe.measure(batch)

    def ingest(
        self, batch: Batch, time: float | FloatArray, measurements: PerSampleGradients | None
    ) -> Outcome:
        """Takes in sound samples that came at `time`, measured: all count for g_hat_c, the best are stored."""
        if not len(batch):
            none = np.empty(0, dtype=np.int64)
            return Outcome(none, none, np.empty(0), np.empty(0))
        regions = self.regions.assign(batch, measurements)
        self.meter.observe(regions, time)
        if measurements is not None:
            for window in self._windows:
                window.add(measurements, regions)
        return self._selection.offer(batch, regions, measurements)

    def participate(self, order: TrainOrder) -> Report:
        """Trains on what is stored and reports (steps 5, 6)."""
        prepared = self.prepare(order)
        return self.complete(prepared, self.learner.train(order.model, prepared.job, order.local))

    def screen(self, order: TrainOrder) -> None:
        """Raises where an order does not fit this device; to be asked before anything of it is followed."""
        told = (
            self.learner.gradient_size
            if self.gist is None or not self.gist.options.shared
            else self.gist.size
        )
        undivided = (
            self.policy.balanced
            and order.assignment is not None
            and len(order.assignment.quotas) == 1
        )
        screen_order(
            order, self.learner.size, told, 1 if undivided else self.regions.count, self.capacity
        )

    def follow(self, order: TrainOrder) -> Batch:
        """Takes note of what an order says of the plan, and gives what there is to train on."""
        self._estimator.settle(order.accepted_round)
        if order.assignment is not None:
            self.assign(order.assignment)
        return self.store.stored().batch

    def prepare(self, order: TrainOrder) -> PendingUpdate:
        """Follows an order up to the training itself."""
        return self.look_ahead(self.draft(order))

    def draft(
        self,
        order: TrainOrder,
        before: PerSampleGradients | None = None,
        after: PerSampleGradients | None = None,
    ) -> PendingUpdate:
        """Follows an order up to a look ahead; a caller may then look ahead, and train, for many devices at once.

        `before` and `after` are what is stored as measured under the model the device has and under the order's, if
        known: a gist needs them both.
        """
        batch = self.follow(order)
        stored = self.store.stored()
        weights = self._weights(stored.regions)
        job = TrainingJob(batch, weights, child_seed(self.seed, "train", order.round))
        drafted = PendingUpdate(order, job, *self._tell(order, batch))
        if (
            self.gist is not None
            and self.model is not None
            and self._probe is not None
            and weights.sum() > 0
        ):
            before = self._probe.measure(batch) if before is None else before
            if after is None:
                drafted.probe = self.learner.probe(order.model)
                after = drafted.probe.measure(batch)
            shared = weights / weights.sum()
            drafted.stored = StoredGradients(
                shared, stored.regions, stored.uses == 0, before, after
            )
            stream = (
                self._selection.shares.values()
                if self._selection.assignment is None
                else self._stream()
            )
            shares = stream / max(stream.sum(), 1e-30)
            fleet = order.direction if self.gist.options.shared else None
            # Where models are not the same, most often the first few numbers tell.
            pairs = ((self.model[:4096], order.model[:4096]), (self.model, order.model))
            moved = not all(np.array_equal(mine, sent) for mine, sent in pairs)
            mending = self.gist.mend(drafted.stored, self.window, shares, fleet, moved=moved)
            drafted.mend(mending, self.learner.gradient_size)
        for window in self._windows:
            window.clear()
        return drafted

    def look_ahead(
        self, drafted: PendingUpdate, ahead: PerSampleGradients | None = None
    ) -> PendingUpdate:
        """Lets a correction count as long as it holds: `ahead` is what is stored, measured after one local step."""
        model, stored, mending = drafted.ahead, drafted.stored, drafted.mending
        if model is not None and stored is not None and mending is not None:
            ahead = self.learner.probe(model).measure(drafted.job.batch) if ahead is None else ahead
            lasting = mending.lasting(stored.slope_to(ahead), drafted.steps)
            drafted.mend(lasting, self.learner.gradient_size)
        return drafted

    def complete(
        self, prepared: PendingUpdate, trained: Vector, stored: PerSampleGradients | None = None
    ) -> Report:
        """Adopts the order's model and reports; `stored` is what is stored as measured under that model, if known."""
        order, job, gradient = prepared.order, prepared.job, prepared.local_gradient
        if order.round != self._round:
            self.store.mark_used(job.batch.ids)
        self._round = order.round
        self._selection.shares.age()
        if self.gist is not None:
            self.gist.keep(prepared.mending)
            if (
                self.gist.options.shared
                and (gradient := self.gist.vector()) is not None
                and self._clip is not None
            ):
                # Where each sample is to be hidden, what is told is no longer than `clip` as a whole.
                length = max(float(np.linalg.norm(gradient)), 1e-30)
                gradient = (gradient * min(1.0, self._clip / length)).astype(np.float32)
        self.adopt(order.model, order.direction, stored, prepared.probe)
        self._selection.divide()
        return Report(
            round=order.round,
            model=trained if len(job.batch) else order.model,
            weight=float(job.weights.sum()),
            steps=prepared.steps,
            samples=len(job.batch),
            local_gradient=gradient,
            gradient_samples=prepared.gradient_samples if gradient is not None else 0,
        )

    def adopt(
        self,
        model: Vector,
        direction: Vector | None,
        stored: PerSampleGradients | None = None,
        probe: GradientProbe | None = None,
    ) -> None:
        """Takes a new model and direction, and re-values what is stored under them."""
        first_direction = self.direction is None and direction is not None
        self.set_model(model, direction, probe)
        if self.options.rescore or first_direction:
            held = self.store.stored()
            measured = self.measure(held.batch) if stored is None else stored
            self._selection.revalue(held, measured, child_seed(self.seed, "revalue", self._round))
        if self.options.max_age is not None:
            self.store.expire(self._selection.arrivals - self.options.max_age)

    def reset_statistics(self) -> None:
        """Forgets all that was summed up of samples which are no longer there; what they taught the model stays."""
        for window in self._windows:
            window.clear()
        self._estimator.drop()
        if self.gist is not None:
            self.gist.keep(None)

    def snapshot(self) -> State:
        """All that the device knows, as plain arrays."""
        state = snapshot_parts(self._parts) | add_prefix("memory", self._selection.memory)
        state["counters"] = np.array([self._selection.arrivals, self._round])
        known = {"model": self.model, "direction": self.direction, "declared": self._declared}
        state |= {name: array for name, array in known.items() if array is not None}
        if (plan := self._selection.assignment) is not None:
            state |= add_prefix(
                "assignment", {name: np.asarray(part) for name, part in vars(plan).items()}
            )
        return state

    def restore(self, state: State) -> None:
        """Becomes the device that `snapshot` described."""
        restore_parts(self._parts, state)
        selection = self._selection
        selection.memory = strip_prefix("memory", state)
        selection.arrivals, self._round = state["counters"].tolist()
        self._declared = state.get("declared")
        selection.assignment = None
        if plan := strip_prefix("assignment", state):
            selection.assignment = Assignment(
                plan["quotas"], plan["label_weights"], float(plan["mass_per_slot"])
            )
        if selection.divides and selection.shares.targets.any():
            self.store.configure(selection.shares.targets)
        self.model = selection.direction = self._probe = None
        if "model" in state:
            self.set_model(state["model"], state.get("direction"))

    def _weights(self, regions: IntArray) -> FloatArray:
        """What each stored sample counts; before there is a plan they count 1 each on average."""
        if (assignment := self._selection.assignment) is not None:
            return self.weighting.weigh(regions, assignment, self._stream())
        if self.weighting.client_label != 1 or not len(regions):
            return np.ones(len(regions))
        return len(regions) * own_mass(regions, self._selection.shares.values())[regions]

    def _stream(self) -> FloatArray:
        """How much of each region the device takes to come: what weights and gist are made for."""
        velocity = self.meter.velocity() if self._declared is None else self._declared
        return (
            velocity.sum() * self._selection.shares.values()
            if self._selection.divides
            else velocity
        )

    def _tell(self, order: TrainOrder, stored: Batch) -> tuple[Vector | None, int]:
        """g_hat_c as far as it is to be told, and the samples behind it; a gist that is to be hidden counts as one."""
        if self.gist is not None and self.gist.options.shared:
            return None, self.window.count if self._clip is None else 1
        if not self._tells:
            return None, 0
        if self.options.gradient_from == "stored":
            gradient = (
                self.learner.probe(order.model).measure(stored).mean_gradient()
                if len(stored)
                else None
            )
            return gradient, len(stored)
        return self._estimator.freeze(self._told, order.round)
