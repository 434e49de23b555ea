"""A device of the fleet: scores what arrives, keeps the best, trains when asked (steps 3 to 6)."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError
from fedkeep.core.gist import Gist, GistOptions
from fedkeep.core.gradient_exchange import gradient_exchange
from fedkeep.core.gradients import GradientAccumulator
from fedkeep.core.participation import Participation
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.protocols import (
    DescribedState,
    GradientProbe,
    Learner,
    OfferResult,
    Outcome,
    PerSampleGradients,
    Store,
    Stored,
)
from fedkeep.core.regions import Regions, regions_for
from fedkeep.core.rules.book import RecordContext, RuleBook
from fedkeep.core.screening import screen_order, screen_samples
from fedkeep.core.seeds import child_seed
from fedkeep.core.selection import LabelFrequencies, Selection
from fedkeep.core.state import (
    add_prefix,
    complete_parts,
    drop_learned,
    drop_misfits,
    restore_parts,
    snapshot_parts,
    spec_parts,
    strip_prefix,
)
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import (
    AnyArray,
    ArraySpec,
    Assignment,
    Batch,
    BoolArray,
    FloatArray,
    IntArray,
    Profile,
    Report,
    State,
    StateSpec,
    TrainOrder,
    Vector,
)
from fedkeep.core.velocity import VelocityMeter
from fedkeep.core.waiting import (
    UNLABELLED,
    Departure,
    LabelResult,
    WaitingRoom,
)
from fedkeep.core.weighting import UNCOORDINATED, Weighting, own_mass


@dataclass(frozen=True)
class StoreRules:
    """How a device treats what it has stored, and how slots are divided."""

    rescore: bool = True
    """Whether stored samples are scored anew whenever a new model and g_hat arrive."""
    max_age: int | None = None
    """Arrivals after which a stored sample makes way for any newcomer; None: never."""
    quotas: Literal["soft", "hard"] = "soft"
    """`soft`: regions borrow the free slots of regions that have not arrived; `hard` is the
    paper."""

    def __post_init__(self) -> None:
        check_range(self, "max_age", least=1)


@dataclass(frozen=True)
class DeviceOptions(StoreRules):
    """How a device treats what it has stored, and what it tells of its stream."""

    gradient_from: Literal["arrivals", "stored"] = "arrivals"
    """What g_hat_c is a mean over; `stored` is the ablation without a local estimator."""


@dataclass(frozen=True)
class RepairedState:
    """A state that a device can be restored from, and what had to be done for it."""

    state: State
    lost: tuple[str, ...]
    """The names of arrays that begin anew: they were missing, or of another form."""
    notes: tuple[str, ...]
    """What else begins anew, in words for an operator."""


class Device:
    """One device: its store, its policy, and what it knows of its stream.

    Its model and the global gradient change only when it takes part, so it may catch up on its
    stream late.

    Parameters
    ----------
    learner : Learner
        The model's architecture, which measures and trains.
    policy : SelectionPolicy
        How samples are scored.
    capacity : int
        How many samples the device can store.
    sample_shape : tuple of int
        The shape of a sample.
    labels : int
        The number of labels.
    targets : NumberTargets, optional
        What targets look like that are numbers to predict; None: they are labels.
    regions : Regions, optional
        What slots are divided among; by default what the policy needs.
    store : Store, optional
        Where samples are kept; by default in memory. A store that is given has its own `after_use`.
    meter : VelocityMeter, optional
        What counts arrivals per unit of time.
    after_use : AfterUse, optional
        What becomes of samples that were trained on, in a store in memory.
    weighting : Weighting, optional
        What each stored sample counts in training.
    options : DeviceOptions, optional
        How stored samples are scored and slots divided.
    gist : GistOptions, optional
        Whether there is a gist, a control variate with memory, and how it is used.
    clip : float, optional
        The length to which gradients are clipped before they are sent; None without noise.
    seed : int, optional
        The seed of all randomness.
    draw_seed : int, optional
        The seed of the samples' random keys by id, instead of by order of arrival.
    waiting : WaitingRoom, optional
        Where samples wait for their labels, in slots beside those of `capacity`.

    Raises
    ------
    ConfigError
        If the options contradict each other.

    Examples
    --------
    >>> from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
    >>> from fedkeep.core.types import LocalTraining
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> learner, policy = DenseLearner((2, 2)), BalancedReservoir()
    >>> local = GistOptions("local")
    >>> device = Device(learner, policy, capacity=2, sample_shape=(2,), labels=2, gist=local)
    >>> device.set_model(learner.initial(0))
    >>> x = np.array([[0, 1], [1, 0], [1, 1], [np.nan, 0]], dtype=np.float32)
    >>> batch = Batch(x, np.array([0, 1, 1, 0]), np.arange(4))
    >>> outcome, rejected = device.observe(batch, time=0.0)
    >>> dict(rejected)  # a sample that holds NaN counts nowhere
    {'not-finite': 1}
    >>> order = TrainOrder(0, learner.initial(1), None, LocalTraining(0.1, epochs=5))
    >>> report = device.participate(order)
    >>> report.samples, report.steps, report.model.shape
    (2, 5, (6,))
    >>> device.gist.latest.ess > 2  # three samples came, and two are stored
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
        targets: NumberTargets | None = None,
        regions: Regions | None = None,
        store: Store | None = None,
        meter: VelocityMeter | None = None,
        after_use: AfterUse = AfterUse(),
        weighting: Weighting | None = None,
        options: DeviceOptions = DeviceOptions(),
        gist: GistOptions = GistOptions(),
        clip: float | None = None,
        seed: int = 0,
        draw_seed: int | None = None,
        waiting: WaitingRoom | None = None,
        rules: RuleBook | None = None,
    ) -> None:
        self.learner, self.policy, self.options, self.seed = learner, policy, options, seed
        self.capacity, self._shape, self._labels = capacity, sample_shape, labels
        self._targets = targets
        self.regions = regions or regions_for(policy, labels, targets)
        count = self.regions.count
        self.meter = meter or VelocityMeter(count)
        self.weighting = weighting or (Weighting() if policy.coordinated else UNCOORDINATED)
        if store is None:
            none = np.zeros(count, dtype=np.int64)
            store = MemoryStore(none, after_use, soft_quotas=options.quotas == "soft")
        self.store = store
        self.exchange = gradient_exchange(policy, gist, options.gradient_from)
        self.sender = self.exchange.sender(learner, count, clip)
        self.gist = self._make_gist(gist)
        self.window = self._make_window(count)
        """The gradients of all arrivals since the model last changed."""
        self.model: Vector | None = None
        """The model last received; None before the first."""
        self.probe: GradientProbe | None = None
        """What measures under that model."""
        self.round = -1
        """The round in which the device last took part."""
        self._declared: FloatArray | None = None
        self.waiting, self.rules = waiting, rules
        self.logits: Callable[[Vector, AnyArray], AnyArray] | None = None
        """What gives class scores from a model and samples, where that is not the learner."""
        self.entering: Callable[[IntArray], None] = lambda _: None
        """Called with the ids of samples whose gradients enter the sum of arrivals."""
        self.counted: Callable[[Batch, PerSampleGradients | None], None] = lambda *_: None
        """Called with samples that count, once their labels are known, as measured."""
        self.context_of: Callable[[int], RecordContext | None] = lambda _: None
        """Tells what rules may know of a sample that waited, when its label comes."""
        self._time = 0.0
        """The latest time that the device has heard of."""
        frequencies = LabelFrequencies(count, child_seed(seed, "turns"))
        self.selection = Selection(policy, self.store, capacity, frequencies, seed, draw_seed)
        self._parts: dict[str, DescribedState] = {
            "store": self.store,
            "meter": self.meter,
            "window": self.window,
            "shares": frequencies,
            **self.sender.parts,
        }
        if self.gist is not None:
            self._parts["gist"] = self.gist
        if waiting is not None:
            self._parts["waiting"] = waiting

    def _make_gist(self, options: GistOptions) -> Gist | None:
        count = self.regions.count
        if not options.kept:
            return None
        if options.label_matching and count > 1 and self.weighting.client_label != 1:
            raise ConfigError(
                "gist.label_matching needs weights by client and label:"
                " set weights.client_label = 1, or label_matching = false"
            )
        layout = options.layout(self.learner)
        return Gist(options, layout, count, self.seed, unbiased=self.policy.unbiased)

    def _make_window(self, regions: int) -> GradientAccumulator:
        """Make what sums arrivals: whole where any part of the device needs it, or as the gist."""
        if self.gist is None and not self.sender.sums_arrivals:
            return GradientAccumulator(0, regions)
        if self.gist is None or self.sender.sums_arrivals:
            return GradientAccumulator(self.learner.gradient_size, regions)
        layout, encoding = self.gist.layout, self.gist.options.window_encoding
        seed = child_seed(self.seed, "window")
        if layout.whole:
            size = self.learner.gradient_size
            return GradientAccumulator(size, regions, encoding=encoding, seed=seed)
        return GradientAccumulator(
            layout.size, regions, layout=layout, encoding=encoding, seed=seed
        )

    @property
    def global_gradient(self) -> Vector | None:
        """The g_hat last received; None before the first."""
        return self.selection.global_gradient

    def set_model(
        self,
        model: Vector,
        global_gradient: Vector | None = None,
        probe: GradientProbe | None = None,
    ) -> None:
        """Set the model under which arrivals are measured from now on.

        Parameters
        ----------
        model : Vector
            The model, (P,).
        global_gradient : Vector, optional
            g_hat, by which the policy may score.
        probe : GradientProbe, optional
            What measures under this model, if there is one already.
        """
        self.model, self.selection.global_gradient = model, global_gradient
        self.probe = self.learner.probe(model) if probe is None else probe
        if self.waiting is not None:
            self.waiting.rank(self.predict)

    def predict(self, x: AnyArray) -> FloatArray | None:
        """Give the probability of each label under the present model, if the waiting room asks."""
        if self.waiting is None or not self.waiting.predicts:
            return None
        return self._probabilities(x)

    def _probabilities(self, x: AnyArray) -> FloatArray | None:
        """Give the probability of each label under the present model; None where there is none."""
        if self.model is None or not len(x) or self._targets is not None:
            return None
        logits_of = self.logits or self.learner.logits
        logits = np.asarray(logits_of(self.model, x), dtype=np.float64)
        if logits.shape != (len(x), self._labels):  # they are no scores of labels
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            scores = np.exp(logits - logits.max(axis=1, keepdims=True))
            return np.asarray(scores / scores.sum(axis=1, keepdims=True))

    def update_model(
        self,
        model: Vector,
        global_gradient: Vector | None,
        measurements: PerSampleGradients | None = None,
    ) -> None:
        """Set model and global gradient outside of a participation, and score the store anew.

        Parameters
        ----------
        model : Vector
            The model, (P,).
        global_gradient : Vector or None
            g_hat.
        measurements : PerSampleGradients, optional
            What is stored, as measured under this model; measured here if not given.
        """
        first_gradient = self.global_gradient is None and global_gradient is not None
        self.set_model(model, global_gradient)
        if self.options.rescore or first_gradient:
            self.rescore(self.store.stored(), measurements)
        self.expire()

    def rescore(self, stored: Stored, measurements: PerSampleGradients | None = None) -> None:
        """Score what is stored anew, under the present model and global gradient."""
        measured = self.measure(stored.batch) if measurements is None else measurements
        self.selection.rescore(stored, measured, child_seed(self.seed, "revalue", self.round))

    def expire(self) -> None:
        """Let samples older than `max_age` arrivals make way for any newcomer."""
        if self.options.max_age is not None:
            self.store.expire(self.selection.arrivals - self.options.max_age)

    def apply_plan(self, assignment: Assignment) -> None:
        """Follow a plan: which regions to store and what each sample counts (step 2)."""
        self.selection.assign(assignment)

    def profile(self) -> Profile:
        """Declare capacity and velocities to the server (step 1).

        The device weighs its samples by the declared velocities until it declares anew. The plan
        rests on them: by any other rate a weight would be cut, or count for too much.
        """
        self._declared = self.meter.velocity()
        return Profile(self.capacity, self._declared)

    def observe(self, batch: Batch, time: float) -> tuple[Outcome, Counter[str]]:
        """Take in arrivals up to `time`, valid or not.

        Returns
        -------
        tuple of Outcome and Counter
            What became of the valid samples, and the number of the others by reason.
        """
        valid, rejected = screen_samples(batch.x, batch.y, self._shape, self._labels, self._targets)
        clean = batch if valid.all() else batch.take(valid)
        if self._targets is not None:
            clean = Batch(clean.x, self._targets.settled(clean.y), clean.ids)
        elif clean.y.dtype.kind == "f":  # whole numbers all the same, or they would not be valid
            clean = Batch(clean.x, clean.y.astype(np.int64), clean.ids)
        return self.ingest(clean, time, self.measure(clean)), rejected

    def measure(self, batch: Batch) -> PerSampleGradients | None:
        """Measure a batch under the model last received; None before there is one."""
        return None if self.probe is None or not len(batch) else self.probe.measure(batch)

    def ingest(
        self,
        batch: Batch,
        time: float | FloatArray,
        measurements: PerSampleGradients | None,
        context: RecordContext | None = None,
    ) -> Outcome:
        """Take in valid samples: all count for the gradients' sums, the best are stored.

        What a rule never stores counts nowhere.

        Parameters
        ----------
        batch : Batch
            The samples, in the order of arrival.
        time : float or FloatArray
            When they came, one time for all or one each.
        measurements : PerSampleGradients or None
            The batch as `measure` gives it.
        context : RecordContext, optional
            What rules may look at beside the samples; by default `time` alone.

        Returns
        -------
        Outcome
            What became of each sample.
        """
        if not len(batch):
            none = np.empty(0, dtype=np.int64)
            return Outcome(none, none, np.empty(0), np.empty(0))
        if self.rules is not None:
            allowed = self._look(self.rules, batch, time, measurements, context)
            if not allowed.all():
                return self._ingest_allowed(batch, time, allowed)
        return self._ingest(batch, time, measurements)

    def _look(
        self,
        rules: RuleBook,
        batch: Batch,
        time: float | FloatArray,
        measurements: PerSampleGradients | None,
        context: RecordContext | None,
    ) -> BoolArray:
        """Match a batch with the rules; what they do not look at is not computed."""
        if context is None:
            context = RecordContext(times=np.broadcast_to(np.float64(time), len(batch)))

        known = self._predictions(batch.x)
        if measurements is not None:
            known["loss"] = measurements.losses
        return rules.look(batch, context, known)

    def _predictions(self, x: AnyArray) -> dict[str, Callable[[], AnyArray]]:
        """Give what tells `prediction` and `confidence`, once they are looked at."""

        @cache
        def predicted() -> FloatArray:
            found = self._probabilities(x)
            return np.full((len(x), 1), np.nan) if found is None else found

        def most_likely() -> FloatArray:
            found = predicted()
            return np.where(np.isnan(found[:, 0]), np.nan, found.argmax(axis=1))

        return {"prediction": most_likely, "confidence": lambda: predicted().max(axis=1)}

    def screen_unlabelled(
        self, x: AnyArray, ids: IntArray, context: RecordContext
    ) -> tuple[BoolArray, dict[int, list[str]]]:
        """Ask the rules about samples that come without labels; see `RuleBook.screen`."""
        assert self.rules is not None, "this device has no rules"
        return self.rules.screen(ids, context, self._predictions(x))

    def _ingest_allowed(
        self, batch: Batch, time: float | FloatArray, allowed: BoolArray
    ) -> Outcome:
        """Ingest part of a batch; the rest is refused and counts nowhere."""
        if self.waiting is not None:
            self.waiting.leave(batch.ids[~allowed], Departure.LABELLED)
        own, n = batch.take(allowed), len(batch)
        part = time[allowed] if isinstance(time, np.ndarray) else time
        found = Outcome(
            np.full(n, int(OfferResult.REFUSED), dtype=np.int64),
            np.full(n, -1, dtype=np.int64),
            np.full(n, np.nan),
            np.full(n, -np.inf),
        )
        if len(own):
            inner = self._ingest(own, part, self.measure(own))
            found.results[allowed], found.evicted[allowed] = inner.results, inner.evicted
            found.thresholds[allowed], found.scores[allowed] = inner.thresholds, inner.scores
        return found

    def _ingest(
        self, batch: Batch, time: float | FloatArray, measurements: PerSampleGradients | None
    ) -> Outcome:
        """Ingest a batch that rules let through."""
        if self.waiting is not None:
            self._time = max(self._time, float(np.max(time)))
            self.waiting.leave(batch.ids, Departure.LABELLED)
        self.counted(batch, measurements)
        regions = self.regions.assign(batch, measurements)
        self.meter.observe(regions, time)
        if measurements is not None:
            self.entering(batch.ids)
            if self.window.size:
                self.window.add(measurements, regions)
            self.sender.add(measurements, regions)
        return self.selection.offer(batch, regions, measurements)

    def wait(
        self, x: AnyArray, ids: IntArray, time: float, held: Container[int] = ()
    ) -> list[tuple[OfferResult, bool]]:
        """Take in valid samples without labels; the rule of the waiting room decides which wait.

        One whose label came before it, or is given by the model itself, counts as an arrival.

        Parameters
        ----------
        x : ndarray
            The samples, (n, ...), in the order of arrival.
        ids : ndarray of int
            Their ids; one that is stored or waits already changes nothing.
        time : float
            When they came.
        held : container of int
            The ids of those that rules want kept.

        Returns
        -------
        list of tuple
            What became of each sample, and whether in the store; else it was in the waiting room.
        """
        assert self.waiting is not None, "this device has no waiting room"
        scores = self.predict(x)
        pseudo = self.waiting.confident(scores)
        results: list[tuple[OfferResult, bool]] = []
        for i, id_ in enumerate(ids.tolist()):
            one = slice(i, i + 1)
            label = self.waiting.early.pop(id_, None)
            sure = len(pseudo) and pseudo[i] != UNLABELLED
            if self.store.label_of(id_) is not None:
                if label is not None:
                    self.label(ids[one], np.array([label]), time)
                results.append((OfferResult.REFRESHED, True))
                continue
            if label is None and sure and id_ not in self.waiting:
                label = int(pseudo[i])
                self.waiting.counts["pseudo"] += 1
            if label is None:
                own = None if scores is None else scores[one]
                [fate] = self.waiting.offer(x[one], ids[one], own, held=id_ in held)
                results.append((fate, False))
                continue
            outcome = self._count(Batch(x[one], self._target(label), ids[one]), time)
            results.append((OfferResult(int(outcome.results[0])), True))
        return results

    def label(
        self, ids: IntArray, labels: AnyArray, time: float
    ) -> list[tuple[LabelResult, OfferResult | None]]:
        """Take in labels of samples that came before, or will come.

        A waiting sample counts as an arrival from now on, under the model of now. Of a stored one
        the label is corrected, and its score renewed: what its gradient added to the sum of
        arrivals, the gist and the label frequencies under the former label stays there.

        Parameters
        ----------
        ids : ndarray of int
            The samples' ids.
        labels : ndarray
            Their labels or targets, which must be valid.
        time : float
            When they came.

        Returns
        -------
        list of tuple
            What became of each label, and of the sample that it made an arrival.
        """
        results: list[tuple[LabelResult, OfferResult | None]] = []
        for id_, label in zip(ids.tolist(), labels.tolist(), strict=True):
            before = self.store.label_of(id_)
            if before is not None:
                results.append((self._correct(id_, before, label), None))
            elif self.waiting is None:
                results.append((LabelResult.UNKNOWN, None))
            elif id_ in self.waiting:
                own = np.array([id_], dtype=np.int64)
                batch = Batch(self.waiting.x([id_]), self._target(label), own)
                outcome = self._count(batch, time)
                results.append((LabelResult.LABELLED, OfferResult(int(outcome.results[0]))))
            else:
                kept = self.waiting.remember(id_, label)
                results.append((LabelResult.EARLY if kept else LabelResult.UNKNOWN, None))
        return results

    def pseudo_label(self) -> int:
        """Let waiting samples of which the model is sure count as arrivals; gives how many did."""
        if self.waiting is None or self.waiting.options.pseudo_labels is None:
            return 0
        ids = self.waiting.ids
        if not len(ids):
            return 0
        x = self.waiting.x(ids.tolist())
        labels = self.waiting.confident(self.predict(x))
        sure = np.flatnonzero(labels != UNLABELLED)
        if len(sure):
            contexts = [self.context_of(id_) for id_ in ids[sure].tolist()]
            self.waiting.leave(ids[sure], Departure.PSEUDO)
            self._count(Batch(x[sure], labels[sure], ids[sure]), self._time, contexts)
        return len(sure)

    def _count(
        self,
        batch: Batch,
        time: float,
        contexts: Sequence[RecordContext | None] | None = None,
    ) -> Outcome:
        """Take in samples whose labels are known now, as arrivals of now."""
        if self.rules is None:
            return self.ingest(batch, time, self.measure(batch))
        if contexts is None:
            contexts = [self.context_of(id_) for id_ in batch.ids.tolist()]
        outcomes = []
        for i, context in enumerate(contexts):
            one = batch.take(slice(i, i + 1))
            outcomes.append(self.ingest(one, time, self.measure(one), context))
        return Outcome.concatenate(outcomes)

    def _target(self, label: float) -> AnyArray:
        """Make the targets of one sample's batch from its label."""
        if self._targets is None:
            return np.array([label], dtype=np.int64)
        return self._targets.settled(np.array([label]))

    def _correct(self, id_: int, before: Any, label: float) -> LabelResult:
        """Replace the label of a stored sample, and score it anew; sums keep what they counted."""
        target = self._target(label)
        if np.array_equal(target[0], before):
            return LabelResult.KNOWN
        stored = self.store.stored()
        place = np.flatnonzero(stored.batch.ids == id_)
        batch = replace(stored.batch.take(place), y=target)
        measured = self.measure(batch)
        region = int(self.regions.assign(batch, measured)[0])
        seed = child_seed(self.seed, "revalue", self.round)
        alone = Stored(
            batch,
            np.array([region]),
            stored.scores[place],
            stored.arrivals[place],
            stored.uses[place],
        )
        score = float(self.selection.new_scores(alone, measured, seed)[0])
        self.store.relabel(id_, target[0].item(), region, score)
        return LabelResult.CORRECTED

    def participate(self, order: TrainOrder) -> Report:
        """Train on what is stored and report (steps 5 and 6)."""
        participation = Participation(self, order)
        participation.prepare()
        return participation.finish(participation.train())

    def screen(self, order: TrainOrder) -> None:
        """Check an order before anything of it is followed.

        Raises
        ------
        RejectedError
            If the order does not fit this device.
        """
        plan = order.assignment
        undivided = self.policy.balanced and plan is not None and len(plan.quotas) == 1
        regions = 1 if undivided else self.regions.count
        size = self.exchange.size(self.learner)
        screen_order(order, self.learner.size, size, regions, self.capacity)

    def sample_weights(self, regions: IntArray, ids: IntArray | None = None) -> FloatArray:
        """Weigh stored samples by their regions; without a plan they count 1 each on average.

        Where rules limit what is kept, a sample counts for others of its group, too: then their
        `ids` tell which.
        """
        weights = self._region_weights(regions)
        return (
            weights
            if self.rules is None or ids is None
            else self.rules.weigh(weights, regions, ids)
        )

    def _region_weights(self, regions: IntArray) -> FloatArray:
        if (assignment := self.selection.assignment) is not None:
            return self.weighting.weigh(regions, assignment, self._rates())
        if self.weighting.client_label != 1 or not len(regions):
            return np.ones(len(regions))
        return len(regions) * own_mass(regions, self.selection.frequencies.values())[regions]

    def label_shares(self) -> FloatArray:
        """Each region's long-run share of the stream, (Y,)."""
        planned = self.selection.assignment is not None
        stream = self._rates() if planned else self.selection.frequencies.values()
        return np.asarray(stream / max(stream.sum(), 1e-30))

    def _rates(self) -> FloatArray:
        """How many samples of each region come in a unit of time, as the device takes it to be."""
        velocity = self.meter.velocity() if self._declared is None else self._declared
        if not self.selection.divides:
            return velocity
        return np.asarray(velocity.sum() * self.selection.frequencies.values())

    def reset_statistics(self) -> None:
        """Drop all sums over samples, as when some are erased.

        What they taught the model stays.
        """
        self.window.clear()
        self.sender.reset()
        if self.gist is not None:
            self.gist.keep(None)

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        count = self.regions.count
        return {
            **spec_parts(self._parts),
            "memory.*": ArraySpec((0,), np.float64, optional=True, learned=True),
            "counters": ArraySpec((2,), np.int64, initial=(0, -1)),
            "model": ArraySpec((self.learner.size,), np.float32, optional=True, learned=True),
            "direction": ArraySpec(
                (self.exchange.size(self.learner),), np.float32, optional=True, learned=True
            ),
            "declared": ArraySpec((count,), np.float64, optional=True),
            "assignment.quotas": ArraySpec((count,), np.int64, bounded=True, optional=True),
            "assignment.label_weights": ArraySpec(
                (count,), np.float64, bounded=True, optional=True
            ),
            "assignment.mass_per_slot": ArraySpec((), np.float64, optional=True),
        }

    def repair(self, found: State, held: Sequence[int], next_arrival: int) -> RepairedState:
        """Complete a state that may be damaged, of other options, or behind the store.

        Parameters
        ----------
        found : State
            What is left of a snapshot.
        held : sequence of int
            The region of each stored sample.
        next_arrival : int
            The least number that the next arrival may have.

        Returns
        -------
        RepairedState
            A state for `restore`: a part that is not whole begins anew, and counts are at least
            those that the stored samples show.
        """
        spec = self.state_spec()
        fitting, misfits = drop_misfits(found, spec)
        notes = []
        if "model" in misfits:
            fitting = drop_learned(fitting, spec)
            notes.append("the model has another size than before: what was learned begins anew")
        state, lost = complete_parts(self._parts, fitting)
        rest = {
            name: array for name, array in fitting.items() if name not in spec_parts(self._parts)
        }
        state |= rest
        if "counters" not in state:
            state["counters"] = spec["counters"].fresh()
            lost.append("counters")
        arrivals, round_ = state["counters"].tolist()
        state["counters"] = np.array([max(arrivals, next_arrival), round_])
        frequencies = strip_prefix("shares", state)
        counts = np.bincount(np.asarray(held, dtype=np.int64), minlength=self.regions.count)
        frequencies = self.selection.frequencies.repair(frequencies, counts, self.capacity)
        state |= add_prefix("shares", frequencies)
        notes += self._repair_plan(state)
        return RepairedState(state, tuple(sorted({*lost, *misfits})), tuple(notes))

    def _repair_plan(self, state: State) -> list[str]:
        """Drop a plan that is incomplete or too large, and slots that do not add up."""
        notes = []
        plan = strip_prefix("assignment", state)
        dropped = len(plan) < len(fields(Assignment))
        if not dropped and plan["quotas"].sum() > self.capacity:
            notes.append(
                f"the plan was for more than the {self.capacity} samples that now fit:"
                " it counts no more"
            )
            dropped = True
        if dropped:
            for name in plan:
                del state[f"assignment.{name}"]
        quotas = state.get("store.quotas")
        own = dropped or self.policy.balanced
        if own and quotas is not None and quotas.sum() != self.capacity:
            del state["store.quotas"]
        return notes

    def snapshot(self) -> State:
        """Take all that the device knows, as plain arrays."""
        state = snapshot_parts(self._parts) | add_prefix("memory", self.selection.memory)
        state["counters"] = np.array([self.selection.arrivals, self.round])
        known = {
            "model": self.model,
            "direction": self.global_gradient,
            "declared": self._declared,
        }
        state |= {name: array for name, array in known.items() if array is not None}
        if (plan := self.selection.assignment) is not None:
            state["assignment.quotas"] = plan.quotas
            state["assignment.label_weights"] = np.asarray(plan.label_weights, dtype=np.float64)
            state["assignment.mass_per_slot"] = np.asarray(plan.mass_per_slot, dtype=np.float64)
        return state

    def restore(self, state: State) -> None:
        """Become the device that `snapshot` described."""
        restore_parts(self._parts, state)
        selection = self.selection
        selection.memory = strip_prefix("memory", state)
        selection.arrivals, self.round = state["counters"].tolist()
        self._declared = state.get("declared")
        selection.assignment = None
        if plan := strip_prefix("assignment", state):
            selection.assignment = Assignment(
                plan["quotas"], plan["label_weights"], float(plan["mass_per_slot"])
            )
        if selection.divides and selection.frequencies.targets.any():
            if selection.frequencies.targets.sum() > self.capacity:  # some slots are others' now
                selection.divide()
            else:
                self.store.configure(selection.frequencies.targets)
        self.model = selection.global_gradient = self.probe = None
        if "model" in state:
            self.set_model(state["model"], state.get("direction"))
        if self.waiting is not None:
            self.waiting.rank(self.predict)
            self.waiting.shrink()
