"""Conformance checks for user-defined policies, learners and sources.

`fedkeep check module:Class` runs the first. A report names each check that ran, and each that could
not show anything, with the reason.

>>> from fedkeep.core.policies.fifo import Fifo
>>> report = check_policy(Fifo())
>>> report.passed
('scores', 'inputs', 'chunking', 'restart', 'repeatable', 'rescoring', 'memory')
>>> report.skipped
{'global-gradient': 'the policy does not use the global gradient'}
"""

import copy
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fedkeep.agent.arrivals import Arrival, IngestQueue, Source
from fedkeep.agent.record import SampleForm
from fedkeep.core.device import Device
from fedkeep.core.errors import FedkeepError
from fedkeep.core.policy import ScoringContext, SelectionPolicy
from fedkeep.core.protocols import Learner, OfferResult, TrainingJob
from fedkeep.core.regions import LabelRegions
from fedkeep.core.state import strip_prefix
from fedkeep.core.types import Assignment, Batch, LocalTraining, Scores, TrainOrder, Vector
from fedkeep.core.weighting import Weighting
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.evaluation import judge, predict

_FEATURES, _LABELS, _SLOTS = 6, 3, 4
_LEARNER = DenseLearner((_FEATURES, _LABELS))


class ConformanceError(AssertionError):
    """A rule that a policy, a learner or a source breaks.

    Parameters
    ----------
    check : str
        The name of the failed check.
    message : str
        The rule, and what was found instead.
    """

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


@dataclass(frozen=True)
class CheckReport:
    """What conformance checks have shown.

    Parameters
    ----------
    passed : tuple of str
        The checks that ran and could have failed, in order.
    skipped : dict of str to str
        The checks that could show nothing about this component, with the reason.
    """

    passed: tuple[str, ...]
    skipped: dict[str, str]


@dataclass
class _Checks:
    """Collects the report while checks run."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def running(self, check: str, rule: str) -> Iterator[None]:
        """Count a check as passed, unless its body finds the rule broken."""
        try:
            yield
        except ConformanceError:
            raise
        except (FedkeepError, ValueError) as error:
            raise ConformanceError(check, f"{rule}: {error}") from error
        self.passed.append(check)

    def require(self, check: str, holds: bool, rule: str) -> None:
        """Count a check as passed, or raise the rule that is broken."""
        if not holds:
            raise ConformanceError(check, rule)
        self.passed.append(check)

    def require_close(self, check: str, a: float, b: float, rule: str) -> None:
        """Count a check as passed if two numbers agree to four digits."""
        near = abs(a - b) <= 1e-4 * max(abs(a), abs(b), 1e-3)
        self.require(check, near, f"{rule} ({a:g} against {b:g})")

    def skip(self, check: str, reason: str) -> None:
        """Note that a check could show nothing."""
        self.skipped[check] = reason

    def report(self) -> CheckReport:
        """Return what was found."""
        return CheckReport(tuple(self.passed), self.skipped)


@dataclass
class _Calls:
    """What a policy was asked while it was observed."""

    scored: int = 0
    rescored: int = 0
    with_gradient: int = 0


def check_policy(policy: SelectionPolicy) -> CheckReport:
    """Run a device with the policy through every rule.

    Parameters
    ----------
    policy : SelectionPolicy
        An instance; every device of the checks has the same.

    Returns
    -------
    CheckReport
        The names of the checks that ran, and of those skipped with the reason.

    Raises
    ------
    ConformanceError
        Names the first check that failed, and the rule.
    """
    checks, calls = _Checks(), _Calls()
    with checks.running("scores", "one number per sample, or -inf"):
        _play(_observed(policy, calls), [7, 5], rounds=2)
        _require_scored(calls)
    with checks.running("inputs", "the samples belong to the caller and must not be written"):
        _play(policy, [20], rounds=2, read_only=True)
    whole = _play(policy, [40], rounds=3)
    if whole.selected:
        single, mixed = _play(policy, [1] * 40, rounds=3), _play(policy, [13, 1, 26], rounds=3)
        same = whole.kept == single.kept == mixed.kept
        checks.require("chunking", same, "what is kept does not depend on chunking")
        straight = _play(policy, [20, 20], rounds=2)
        restarted = _play(policy, [20, 20], rounds=2, restart=True)
        same = straight.kept == restarted.kept
        checks.require("restart", same, "what is kept survives snapshot and restore")
        same = straight.kept == _play(policy, [20, 20], rounds=2).kept
        rule = "the same seed keeps the same samples; take randomness from view.uniform"
        checks.require("repeatable", same, rule)
    else:
        for check in ("chunking", "restart", "repeatable"):
            checks.skip(check, "there was never a choice: the store had room for every sample")
    _check_rescoring(policy, checks, calls)
    longer = _play(policy, [40], rounds=6)
    if policy.unbounded:
        checks.skip("memory", "the policy keeps everything")
    else:
        bounded = longer.memory_bytes <= whole.memory_bytes
        rule = f"view.memory is bounded: {whole.memory_bytes} bytes grew to {longer.memory_bytes}"
        checks.require("memory", bounded, rule)
    return checks.report()


def _require_scored(calls: _Calls) -> None:
    if not calls.scored:
        raise ConformanceError("scores", "the device must ask the policy for scores")


def _check_rescoring(policy: SelectionPolicy, checks: _Checks, calls: _Calls) -> None:
    """Require that stored samples get scores under a new model, and under a global gradient."""
    if calls.rescored:
        checks.passed.append("rescoring")
    else:
        checks.skip("rescoring", "the device never asked for new scores of stored samples")
    if not policy.uses_global_gradient:
        checks.skip("global-gradient", "the policy does not use the global gradient")
    elif calls.with_gradient:
        with_gradient, without = (
            _play(policy, [30], rounds=3, gradient=gradient).kept for gradient in (True, False)
        )
        rule = "a policy that uses the global gradient keeps other samples without it"
        checks.require("global-gradient", with_gradient != without, rule)


def _observed(policy: SelectionPolicy, calls: _Calls) -> SelectionPolicy:
    """Make a copy of the policy that counts its calls, and whose scores the core checks.

    The core takes the scores of fedkeep's own classes as they are; the copy's class is none.
    """
    own: Any = type(policy)

    def score(self: SelectionPolicy, batch: Batch, view: ScoringContext) -> Scores:
        calls.scored += view.previous is None
        calls.rescored += view.previous is not None
        calls.with_gradient += view.global_gradient is not None
        scores: Scores = own.score(self, batch, view)
        return scores

    made = copy.copy(policy)
    attributes = {"score": score, "__module__": "observed", "__slots__": ()}
    object.__setattr__(made, "__class__", type(own.__name__, (own,), attributes))
    return made


@dataclass(frozen=True)
class _Played:
    """How a device ended: stored ids, how often it chose between samples, bytes of memory."""

    kept: list[int]
    selected: int
    memory_bytes: int


def _play(
    policy: SelectionPolicy,
    chunks: Sequence[int],
    rounds: int,
    *,
    restart: bool = False,
    read_only: bool = False,
    gradient: bool = True,
) -> _Played:
    """Let arrivals come in chunks and the device take part, `rounds` times; first without g_hat."""
    device, samples, start = _device(policy), _samples(sum(chunks) * rounds), 0
    selected = 0
    for array in (samples.x, samples.y, samples.ids):
        array.setflags(write=not read_only)
    for round_ in range(rounds):
        for chunk in chunks:
            part = samples.take(slice(start, start + chunk))
            outcome, _ = device.observe(part, float(round_))
            left_out = np.isin(outcome.results, [OfferResult.REFUSED, OfferResult.REPLACED])
            selected += int(left_out.sum())
            start += chunk
            if restart:
                state, device = device.snapshot(), _device(policy)
                device.restore(state)
        device.participate(_order(round_, gradient=gradient))
    kept = list(device.store.stored().batch.ids.tolist())
    memory = strip_prefix("memory", device.snapshot())
    return _Played(kept, selected, sum(array.nbytes for array in memory.values()))


def _device(policy: SelectionPolicy) -> Device:
    device = Device(
        _LEARNER,
        policy,
        capacity=_SLOTS * _LABELS,
        sample_shape=(_FEATURES,),
        labels=_LABELS,
        regions=LabelRegions(_LABELS),
        weighting=Weighting(),
        seed=3,
    )
    device.set_model(_LEARNER.initial(1))
    device.apply_plan(Assignment(np.full(_LABELS, _SLOTS), np.ones(_LABELS), 1.0))
    return device


def _order(round_: int, *, gradient: bool) -> TrainOrder:
    rng = np.random.default_rng(round_)
    global_gradient: Vector = rng.standard_normal(_LEARNER.gradient_size).astype(np.float32)
    return TrainOrder(
        round_,
        _LEARNER.initial(round_ + 2),
        global_gradient if round_ and gradient else None,
        LocalTraining(0.1, 2),
    )


def _samples(n: int) -> Batch:
    """Make samples of which some come twice."""
    ids = np.random.default_rng(n).integers(0, max(1, 3 * n // 4), n)
    features = np.random.default_rng(7).standard_normal((n, _FEATURES)).astype(np.float32)
    return Batch(features[ids], ids % _LABELS, ids)


class SourceHarness(Protocol):
    """What `check_source` needs to know of a source: how to make it, and what stands before it."""

    features: int
    """How many numbers a sample has."""

    def make(self) -> Source:
        """Return the source as configured; each life of the agent makes it anew."""

    def send(self, samples: Sequence[tuple[list[float], int, str]]) -> None:
        """Put records (x, y, id) on the stream, as its sender does; may be called in any thread."""

    def send_garbage(self) -> None:
        """Put something on the stream that is no record."""

    def outstanding(self) -> int | None:
        """Return how many records the stream still holds.

        Those are the ones that were sent, and neither deleted nor acknowledged.

        None for a stream without a way back, such as a pipe.
        """


def check_source(harness: SourceHarness, patience: float = 20.0) -> list[str]:
    """Check that a source keeps the agent's rule: a record leaves it only with its fate.

    Parameters
    ----------
    harness
        The source and its stream, which must be empty.
    patience
        Seconds that the source may take for anything.

    Returns
    -------
    list of str
        The laws that were checked.

    Raises
    ------
    ConformanceError
        If the source breaks one.
    """
    answers, first = harness.outstanding() is not None, _records(harness, 0, 20)
    # 1. Records come as they were sent, each once; those without a fate stay where they are.
    with _reading(harness, patience) as reader:
        harness.send(first)
        arrived = reader.take(len(first))
        _require(
            Counter(str(one.id) for one in arrived) == Counter(id_ for _, _, id_ in first),
            "each record arrives once, under its id as it came",
        )
        sent = {id_: (x, y) for x, y, id_ in first}
        for one in arrived:
            x, y = sent[str(one.id)]
            exact = (
                one.x is not None and np.array_equal(one.x, np.array(x, np.float32)) and one.y == y
            )
            _require(exact, "numbers and labels arrive as they were sent")
            _require(one.source == reader.source.name, "arrivals carry the source's name")
        if answers:
            _require(
                all(one.acknowledge is not None for one in arrived),
                "records that can be sent again come with a function that acknowledges them",
            )
            _require(
                not reader.waits_for(lambda: (harness.outstanding() or 0) < len(first), 0.5),
                "a record without a fate is neither deleted nor acknowledged",
            )
        _require(not reader.take(1, 0.5), "a record that waits for its fate is not read again")
    _require(reader.ended, "run returns once the intake is stopped")
    # 2. What had no fate comes again in the next life; what had one leaves the stream.
    if answers:
        with _reading(harness, patience) as reader:
            again = reader.take(len(first))
            _require(
                {str(one.id) for one in again} == sent.keys(),
                "records without a fate come again to the agent that comes next",
            )
            for one in again:
                one.answer("kept")
            _require(
                reader.waits_for(lambda: harness.outstanding() == 0),
                "a record with a fate leaves the stream",
            )
    # 3. While the disk takes nothing, everybody waits: nothing is lost or skipped.
    many = _records(harness, 100, 40)
    with _reading(harness, patience, limit=4) as reader:
        reader.intake.hold(held=True)
        sending = threading.Thread(target=harness.send, args=(many,), daemon=True)
        sending.start()
        reader.waits_for(lambda: len(reader.intake) == 4)
        _require(len(reader.intake) <= 4, "the queue stays within its limit")
        arrived = reader.take(len(many), each=lambda one: one.answer("kept"))
        _require(
            Counter(str(one.id) for one in arrived) == Counter(id_ for _, _, id_ in many),
            "while the agent's disk takes nothing, every record waits",
        )
        sending.join(patience)
        harness.send_garbage()
        _require(
            reader.waits_for(lambda: reader.refused > 0), "what is no record is refused and counted"
        )
        _require(
            not reader.counts["skipped.sample"], "while the disk takes nothing, none is skipped"
        )
        if answers:
            _require(
                reader.waits_for(lambda: harness.outstanding() == 0),
                "a record with a fate leaves the stream",
            )
    _require(reader.ended, "run returns once the intake is stopped")
    laws = ["arrival", "refusal", "waiting", "stopping"]
    return [*laws, "fate", "redelivery"] if answers else laws


def _require(holds: bool, law: str) -> None:
    if not holds:
        raise ConformanceError("source", law)


class _Reader:
    """A source that runs in a thread, and what it has handed over."""

    def __init__(self, source: Source, intake: IngestQueue, patience: float) -> None:
        self.source, self.intake, self._patience = source, intake, patience
        self.ended = False
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            self.source.run(self.intake)
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            self.errors.append(error)

    @property
    def refused(self) -> int:
        self.counts.update(self.intake.counted())
        return sum(n for name, n in self.counts.items() if name.startswith("refused."))

    def take(
        self, count: int, patience: float | None = None, each: Any = lambda _: None
    ) -> list[Arrival]:
        """At most `count` arrivals, and those that follow at once."""
        taken: list[Arrival] = []
        deadline = time.monotonic() + (self._patience if patience is None else patience)
        while time.monotonic() < deadline and not self.errors:
            for one in self.intake.take(1024, 0.05, 0.0):
                taken.append(one)
                each(one)
                if len(taken) == count:
                    # Whatever should not come has a moment to come.
                    deadline = min(deadline, time.monotonic() + 0.3)
        _require(not self.errors, f"run goes on whatever the stream brings ({self.errors})")
        self.counts.update(self.intake.counted())
        return taken

    def waits_for(self, condition: Any, patience: float | None = None) -> bool:
        """Whether something comes to be true."""
        deadline = time.monotonic() + (self._patience if patience is None else patience)
        while not condition():
            _require(not self.errors, f"run goes on whatever the stream brings ({self.errors})")
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


@contextmanager
def _reading(harness: SourceHarness, patience: float, limit: int = 1024) -> Iterator[_Reader]:
    """One life of an agent that reads the source."""
    intake = IngestQueue(limit, SampleForm(np.dtype(np.float32), (harness.features,)))
    source = harness.make()
    source.open()
    reader = _Reader(source, intake, patience)
    thread = threading.Thread(target=reader.run, daemon=True)
    thread.start()
    try:
        yield reader
    finally:
        intake.stop()
        thread.join(patience)
        reader.ended = not thread.is_alive()
        source.close()


def _records(harness: SourceHarness, first: int, count: int) -> list[tuple[list[float], int, str]]:
    rows = np.random.default_rng(first).standard_normal((count, harness.features)).round(3)
    return [(rows[i].tolist(), i % 3, f"record-{first + i}") for i in range(count)]


def check_learner(learner: Learner, batch: Batch, seed: int = 0) -> CheckReport:
    """Check the learner's measurements on a batch against each other and finite differences.

    Parameters
    ----------
    learner : Learner
        What is checked.
    batch : Batch
        Samples of its form, two or more.
    seed : int
        Of the model and of the vectors that gradients are projected on.

    Returns
    -------
    CheckReport
        The names of the checks that ran, and of those skipped with the reason.

    Raises
    ------
    ConformanceError
        Names the first check that failed, and the rule.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(9, 4)).astype(np.float32)
    >>> report = check_learner(DenseLearner((4, 2)), Batch(x, rng.integers(0, 2, 9), np.arange(9)))
    >>> report.passed[-3:], report.skipped
    (('repeatable', 'correction', 'train-many'), {})
    """
    checks, model = _Checks(), learner.initial(seed)
    _check_measurements(learner, batch, model, seed, checks)
    _check_finite_differences(learner, batch, model, seed, checks)
    _check_training(learner, batch, model, seed, checks)
    return checks.report()


def _projected_on(learner: Learner, seed: int) -> Vector:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(learner.gradient_size).astype(np.float32)


def _check_measurements(
    learner: Learner, batch: Batch, model: Vector, seed: int, checks: _Checks
) -> None:
    """Compare projections, norms, mean, weighted mean and losses with each other."""
    measured, axis = learner.probe(model).measure(batch), _projected_on(learner, seed)
    projections, norms = measured.projections(axis), measured.norms()
    mean = measured.mean_gradient()
    long_enough = mean.shape == (learner.gradient_size,)
    checks.require("shape", long_enough, "the mean gradient has `gradient_size` numbers")
    along = float(mean.astype(np.float64) @ axis)
    rule = "the mean of the projections is that of the mean"
    checks.require_close("mean", float(projections.mean()), along, rule)
    weights = np.random.default_rng([seed, 1]).random(len(batch))
    weighted = float(measured.weighted_gradient(weights).astype(np.float64) @ axis)
    expected = float((weights * projections).mean())
    rule = "the weighted gradient weighs each sample's own"
    checks.require_close("weighted", expected, weighted, rule)
    most = norms * np.linalg.norm(axis) * (1 + 1e-4) + 1e-6
    bounded = bool((np.abs(projections) <= most).all())
    checks.require("norms", bounded, "no projection exceeds its norm")
    evaluate = predict if batch.y.dtype.kind == "f" else judge
    losses, _ = evaluate(learner, model, batch.x, batch.y)
    rule = "losses follow the logits"
    checks.require_close("losses", float(measured.losses().mean()), float(losses.mean()), rule)
    if len(batch) < 2:
        checks.skip("one-by-one", "the batch has a single sample")
        return
    alone = learner.probe(model).measure(batch.take(slice(0, 1))).projections(axis)
    same = bool(np.allclose(alone, projections[:1], rtol=1e-4, atol=1e-6))
    checks.require("one-by-one", same, "a sample measures alone as it does in a batch")


def _check_finite_differences(
    learner: Learner, batch: Batch, model: Vector, seed: int, checks: _Checks
) -> None:
    """Compare projections with the change of each loss; the valued parameters stand last."""
    measured, axis = learner.probe(model).measure(batch), _projected_on(learner, seed)
    projections = measured.projections(axis)
    step = 1e-2 / float(np.linalg.norm(axis))
    shift = np.zeros_like(model)
    shift[len(model) - len(axis) :] = np.float32(step) * axis
    ahead, behind = (
        learner.probe(model + sign * shift).measure(batch).losses() for sign in (1, -1)
    )
    slopes = (ahead - behind) / (2 * step)
    near = np.abs(slopes - projections) <= 0.02 * (np.abs(projections).max() + 1e-9)
    rule = "projections are derivatives of the losses"
    checks.require("finite-differences", bool(near.all()), rule)


def _check_training(
    learner: Learner, batch: Batch, model: Vector, seed: int, checks: _Checks
) -> None:
    """Train a little: the loss falls, the result repeats, a correction is added to each step."""
    job, local = TrainingJob(batch, np.ones(len(batch)), seed=0), LocalTraining(1e-3, 5)
    trained = learner.train(model, job, local)
    before = learner.probe(model).measure(batch).losses().mean()
    after = learner.probe(trained).measure(batch).losses().mean()
    checks.require("training", bool(after < before), "training lowers the loss")
    repeats = bool((learner.train(model, job, local) == trained).all())
    checks.require("repeatable", repeats, "training repeats to the bit")
    rate = 0.1
    correction, one_step = _projected_on(learner, seed), LocalTraining(rate, 1)
    corrected_job = TrainingJob(batch, job.weights, seed=0, correction=correction)
    plain = learner.train(model, job, one_step)
    corrected = learner.train(model, corrected_job, one_step)
    expected = plain.astype(np.float64)
    expected[len(model) - len(correction) :] -= rate * correction
    moved = (corrected.astype(np.float64) - plain)[len(model) - len(correction) :]
    rule = "a correction is added to the gradient of every step"
    exact = bool(np.allclose(corrected, expected, rtol=1e-3, atol=1e-4))
    if exact or not moved @ correction < 0:
        checks.require("correction", exact, rule)
    else:
        reason = "the step follows the correction, but not by learning rate times it"
        checks.skip("correction", f"{reason}: the learner constrains its parameters")
    train_many: Any = getattr(learner, "train_many", None)
    if train_many is None:
        checks.skip("train-many", "the learner has no train_many: it trains one device at a time")
        return
    together = train_many(model, [job, corrected_job], one_step)
    pairs = zip(together, (plain, corrected), strict=True)
    same = all(np.allclose(many, one, rtol=1e-4, atol=1e-6) for many, one in pairs)
    checks.require("train-many", same, "jobs trained together end as each one does alone")
