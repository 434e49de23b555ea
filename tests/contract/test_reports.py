"""What conformance checks report: a broken component fails the check named for its fault."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fedkeep.core.policies.fifo import Fifo
from fedkeep.core.policies.full_data import FullData
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policy import ScoringContext, SelectionPolicy
from fedkeep.core.protocols import TrainingJob
from fedkeep.core.types import Batch, LocalTraining, Scores, Vector
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.testing import ConformanceError, check_learner, check_policy


class Nan(SelectionPolicy):
    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        return view.uniform * float("nan")


class NanFifo(Fifo):
    """A class of fedkeep's own is checked no less."""

    __module__ = "fedkeep.core.policies.fifo"

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        return view.uniform * float("nan")


class Writes(SelectionPolicy):
    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        batch.x[:] = 0
        return view.uniform


class ScoresByTheChunk(SelectionPolicy):
    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        losses = view.measurements.losses()
        return losses - losses.mean()


class ForgetsAtARestart(SelectionPolicy):
    """Counts each device's samples in the policy, where no snapshot finds the count."""

    def __init__(self) -> None:
        self._counts: list[tuple[object, int]] = []

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        if view.previous is not None:
            return view.previous
        seen = sum(count for memory, count in self._counts if memory is view.memory)
        self._counts.append((view.memory, len(batch)))
        numbers = seen + np.arange(len(batch))
        return (numbers * 7919 % 1009).astype(float)


class CountsCalls(SelectionPolicy):
    """Keeps state of its own, which later devices begin with."""

    def __init__(self) -> None:
        self.samples = 0

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        if view.previous is not None:
            return view.previous
        numbers = self.samples + np.arange(len(batch))
        self.samples += len(batch)
        return (numbers * 7919 % 1009).astype(float)


class RemembersEverything(SelectionPolicy):
    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        if view.previous is None:
            for number in view.arrival:
                view.memory[f"seen/{number}"] = np.zeros(1)
        return view.uniform


class IgnoresTheGlobalGradient(SelectionPolicy):
    uses_global_gradient = True

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        return view.uniform


@pytest.mark.parametrize(
    ("policy", "check"),
    [
        (Nan(), "scores"),
        (NanFifo(), "scores"),
        (Writes(), "inputs"),
        (ScoresByTheChunk(), "chunking"),
        (ForgetsAtARestart(), "restart"),
        (CountsCalls(), "chunking"),
        (RemembersEverything(), "memory"),
        (IgnoresTheGlobalGradient(), "global-gradient"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_policy_fails_the_check_of_its_fault(policy: SelectionPolicy, check: str) -> None:
    with pytest.raises(ConformanceError) as found:
        check_policy(policy)
    assert found.value.check == check
    assert str(found.value).startswith(f"{check}: ")


def test_what_could_not_be_shown_is_no_pass() -> None:
    report = check_policy(Fifo())
    assert "global-gradient" in report.skipped
    assert "global-gradient" not in report.passed
    assert "global-gradient" in check_policy(Ode()).passed
    assert "memory" in check_policy(FullData()).skipped
    assert not set(report.passed) & set(report.skipped)


class Broken(DenseLearner):
    """A dense learner whose measurements are altered by name."""

    def __init__(self, method: str, change: Any) -> None:
        super().__init__((4, 3))
        self._method, self._change = method, change

    def probe(self, model: Vector) -> Any:
        return _BrokenProbe(super().probe(model), self._method, self._change)


@dataclass
class _BrokenProbe:
    whole: Any
    method: str
    change: Any

    def measure(self, batch: Batch) -> Any:
        return _BrokenMeasurements(self.whole.measure(batch), self.method, self.change)


@dataclass
class _BrokenMeasurements:
    whole: Any
    method: str
    change: Any

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.whole, name)
        if name != self.method:
            return found
        return lambda *arguments: self.change(found(*arguments))


class IgnoresCorrections(DenseLearner):
    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        return super().train(model, replace(job, correction=None), local)


class ClimbsTheLoss(DenseLearner):
    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        return 2 * model - super().train(model, job, local)


class TrainsByChance(DenseLearner):
    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        noise = np.random.default_rng().normal(scale=1e-7, size=model.shape)
        return np.asarray(super().train(model, job, local) + noise, dtype=np.float32)


class MixesUpDevices(DenseLearner):
    def train_many(self, model: Vector, jobs: Any, local: LocalTraining) -> list[Vector]:
        return super().train_many(model, jobs, local)[::-1]

    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        return super().train_many(model, [job], local)[0]


@pytest.mark.parametrize(
    ("learner", "check"),
    [
        (Broken("mean_gradient", lambda mean: mean[1:]), "shape"),
        (Broken("mean_gradient", lambda mean: 1.1 * mean), "mean"),
        (Broken("weighted_gradient", lambda mean: 1.1 * mean), "weighted"),
        (Broken("norms", lambda norms: 0.01 * norms), "norms"),
        (Broken("losses", lambda losses: losses + 1), "losses"),
        (Broken("projections", lambda p: p + (len(p) == 1)), "one-by-one"),
        (Broken("losses", lambda losses: 2 * losses - losses.mean()), "finite-differences"),
        (ClimbsTheLoss((4, 3)), "training"),
        (TrainsByChance((4, 3)), "repeatable"),
        (IgnoresCorrections((4, 3)), "correction"),
        (MixesUpDevices((4, 3)), "train-many"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_learner_fails_the_check_of_its_fault(learner: DenseLearner, check: str) -> None:
    with pytest.raises(ConformanceError) as found:
        check_learner(learner, _batch(12))
    assert found.value.check == check


def test_a_sound_learner_passes_everything() -> None:
    report = check_learner(DenseLearner((4, 3)), _batch(12))
    assert report.skipped == {}
    assert len(report.passed) == 11
    assert set(check_learner(DenseLearner((4, 3)), _batch(1)).skipped) == {"one-by-one"}


def _batch(n: int) -> Batch:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    return Batch(x, rng.integers(0, 3, n), np.arange(n))
