"""Conformance checks for user-defined policies and learners.

`fedkeep check module:Class` runs the first.

Examples
--------
>>> from fedkeep.core.policies.fifo import Fifo
>>> check_policy(Fifo())
['scores', 'inputs', 'chunking', 'restart', 'repeatable']
"""

from collections.abc import Sequence

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.errors import FedkeepError
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.protocols import Learner, TrainingJob
from fedkeep.core.regions import LabelRegions
from fedkeep.core.types import Assignment, Batch, LocalTraining, TrainOrder
from fedkeep.core.weighting import Weighting
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.evaluation import judge

_FEATURES, _LABELS, _SLOTS = 6, 3, 4
_LEARNER = DenseLearner((_FEATURES, _LABELS))


class ConformanceError(AssertionError):
    """An invariant that a policy or learner violates."""


def check_policy(policy: SelectionPolicy) -> list[str]:
    """Check every invariant of a policy on a simulated device.

    Parameters
    ----------
    policy : SelectionPolicy
        The policy; it is run on several small devices.

    Returns
    -------
    list of str
        The names of the invariants that were checked.

    Raises
    ------
    ConformanceError
        If the policy violates one; the sentence names it.
    """
    try:
        _play(policy, [7, 5], rounds=2)
    except FedkeepError as error:  # one valid number per sample
        raise ConformanceError(str(error)) from error
    batch, device = _samples(20), _device(policy)
    for array in (batch.x, batch.y, batch.ids):
        array.setflags(write=False)
    try:
        device.observe(batch, 0.0)
        device.participate(_order(0))
    except (FedkeepError, ValueError) as error:
        raise ConformanceError(
            f"the samples belong to the caller and must not be written: {error}"
        ) from error
    whole, mixed = _play(policy, [40], rounds=3), _play(policy, [13, 1, 26], rounds=3)
    _require(
        whole == _play(policy, [1] * 40, rounds=3) == mixed,
        "what is kept does not depend on chunking",
    )
    restarted = _play(policy, [20, 20], rounds=2, restart=True)
    _require(
        _play(policy, [20, 20], rounds=2) == restarted, "what is kept survives snapshot and restore"
    )
    _require(
        _play(policy, [30], rounds=2) == _play(policy, [30], rounds=2),
        "the same seed keeps the same samples; take randomness from view.uniform",
    )
    return ["scores", "inputs", "chunking", "restart", "repeatable"]


def _play(
    policy: SelectionPolicy, chunks: Sequence[int], rounds: int, *, restart: bool = False
) -> list[int]:
    """Return the ids stored after `rounds` times the arrivals, in chunks, and a participation.

    The first participation is without a global gradient.
    """
    device, samples, start = _device(policy), _samples(sum(chunks) * rounds), 0
    for round_ in range(rounds):
        for chunk in chunks:
            device.observe(samples.take(slice(start, start + chunk)), float(round_))
            start += chunk
            if restart:
                state, device = device.snapshot(), _device(policy)
                device.restore(state)
        device.participate(_order(round_))
    return list(device.store.stored().batch.ids.tolist())


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


def _order(round_: int) -> TrainOrder:
    direction = (
        np.random.default_rng(round_).standard_normal(_LEARNER.gradient_size).astype(np.float32)
    )
    return TrainOrder(
        round_, _LEARNER.initial(round_ + 2), direction if round_ else None, LocalTraining(0.1, 2)
    )


def _samples(n: int) -> Batch:
    """Return samples of which some occur twice."""
    ids = np.random.default_rng(n).integers(0, max(1, 3 * n // 4), n)
    features = np.random.default_rng(7).standard_normal((n, _FEATURES)).astype(np.float32)
    return Batch(features[ids], ids % _LABELS, ids)


def check_learner(learner: Learner, batch: Batch, seed: int = 0) -> list[str]:
    """Check a learner's per-sample gradients against each other and against finite differences.

    Parameters
    ----------
    learner : Learner
        The learner.
    batch : Batch
        A few samples that it can train on.
    seed : int
        Seed of the first model and of the directions that are tried.

    Returns
    -------
    list of str
        The names of the invariants that were checked.

    Raises
    ------
    ConformanceError
        If the learner violates one; the sentence names it.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> features = rng.normal(size=(9, 4)).astype(np.float32)
    >>> batch = Batch(features, rng.integers(0, 2, 9), np.arange(9))
    >>> check_learner(DenseLearner((4, 2)), batch)[-2:]
    ['finite-differences', 'training']
    """
    model = learner.initial(seed)
    measured = learner.probe(model).measure(batch)
    rng = np.random.default_rng(seed)
    direction = rng.standard_normal(learner.gradient_size).astype(np.float32)
    projections, norms, mean = (
        measured.projections(direction),
        measured.norms(),
        measured.mean_gradient(),
    )
    _require(
        mean.shape == (learner.gradient_size,), "the mean gradient has the length of a direction"
    )
    along = float(mean.astype(np.float64) @ direction)
    _require_close(projections.mean(), along, "the mean of the projections is that of the mean")
    weights = rng.random(len(batch))
    weighted = float(measured.weighted_gradient(weights).astype(np.float64) @ direction)
    _require_close(
        (weights * projections).mean(), weighted, "the weighted gradient weighs each sample's own"
    )
    most = norms * np.linalg.norm(direction) * (1 + 1e-4) + 1e-6
    _require(bool((np.abs(projections) <= most).all()), "no projection exceeds its norm")
    losses, _ = judge(learner, model, batch.x, batch.y)
    _require_close(measured.losses().mean(), losses.mean(), "losses follow the logits")
    alone = learner.probe(model).measure(batch.take(slice(0, 1))).projections(direction)
    _require(bool(np.allclose(alone, projections[:1], rtol=1e-4, atol=1e-6)), "one by one")
    # Projections are compared with the change of each loss along the direction; the parameters
    # whose gradients are measured come last in the model vector.
    step = 1e-2 / float(np.linalg.norm(direction))
    shift = np.zeros_like(model)
    shift[len(model) - len(direction) :] = np.float32(step) * direction
    ahead, behind = (
        learner.probe(model + sign * shift).measure(batch).losses() for sign in (1, -1)
    )
    near = np.abs((ahead - behind) / (2 * step) - projections) <= 0.02 * (
        np.abs(projections).max() + 1e-9
    )
    _require(bool(near.all()), "projections are derivatives of the losses")
    job, local = TrainingJob(batch, np.ones(len(batch)), seed=0), LocalTraining(1e-3, 5)
    trained = learner.train(model, job, local)
    after = learner.probe(trained).measure(batch).losses().mean()
    _require(bool(after < measured.losses().mean()), "training lowers the loss")
    _require(
        bool((learner.train(model, job, local) == trained).all()), "training repeats to the bit"
    )
    return ["shape", "mean", "norms", "losses", "one-by-one", "finite-differences", "training"]


def _require_close(a: float, b: float, invariant: str) -> None:
    _require(abs(a - b) <= 1e-4 * max(abs(a), abs(b), 1e-3), f"{invariant} ({a:g}, not {b:g})")


def _require(holds: bool, invariant: str) -> None:
    if not holds:
        raise ConformanceError(invariant)
