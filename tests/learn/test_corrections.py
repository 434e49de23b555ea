"""Corrected local training, in every backend, against a loop that writes the formula out."""

from pathlib import Path
from typing import cast
from unittest.mock import MagicMock

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the torch extra")
pytest.importorskip("onnxscript", reason="needs the export extra")

from fedkeep.core.protocols import FleetLearner, Learner, TrainingJob
from fedkeep.core.types import LocalTraining
from fedkeep.learn.torch_learner import TorchLearner
from tests.learn.written_out import CASES, Case, WrittenOut, batch_of

LOCALS = {
    "plain": LocalTraining(0.05, 4),
    "proximal": LocalTraining(0.05, 4, proximal=0.7),
    "mini-batches": LocalTraining(0.05, 2, batch_size=3, proximal=0.3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corrections")


def job_of(case: Case, learner: Learner, n: int, seed: int) -> TrainingJob:
    """A job whose correction is about as long as a gradient; one sample has weight 0."""
    rng = np.random.default_rng(seed + 50)
    weights = rng.uniform(0.2, 2.0, n)
    weights[-1] = 0.0 if n > 2 else 1.0
    length = learner.gradient_size**-0.5
    return TrainingJob(
        batch_of(case, n, seed),
        weights,
        seed,
        length * rng.normal(size=learner.gradient_size).astype("f4"),
    )


@pytest.mark.parametrize("how", LOCALS)
@pytest.mark.parametrize("name", CASES)
def test_one_device_trains_by_the_formula(name: str, how: str, folder: Path) -> None:
    case, local = CASES[name], LOCALS[how]
    learner = case.learner(folder)
    model, job = learner.initial(0), job_of(case, learner, 7, 1)
    before = job.correction.copy()  # type: ignore[union-attr]
    expected = WrittenOut(case, learner.gradient_size).trained(model, job, local)
    trained = learner.train(model, job, local)
    np.testing.assert_allclose(trained, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(job.correction, before)
    plain = learner.train(model, TrainingJob(job.batch, job.weights, job.seed), local)
    assert np.abs(plain - trained).max() > 1e-4


@pytest.mark.parametrize("how", LOCALS)
@pytest.mark.parametrize("name", [name for name in CASES if name != "onnx"])
def test_many_devices_train_by_the_formula(
    name: str, how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of different sizes; one job without correction, one with all sample weights 0."""
    case, local = CASES[name], LOCALS[how]
    learner = cast("FleetLearner", case.learner(folder))
    model, jobs = (
        learner.initial(0),
        [job_of(case, learner, n, seed) for seed, n in enumerate((3, 1, 7, 2))],
    )
    jobs[1] = TrainingJob(jobs[1].batch, jobs[1].weights, 1)
    jobs[3] = TrainingJob(jobs[3].batch, np.zeros(2), 3, jobs[3].correction)
    together = MagicMock(wraps=getattr(learner, "_chained", None))
    monkeypatch.setattr(learner, "_chained", together, raising=False)
    written = WrittenOut(case, learner.gradient_size)
    for trained, job in zip(learner.train_many(model, jobs, local), jobs, strict=True):
        np.testing.assert_allclose(trained, written.trained(model, job, local), rtol=0, atol=1e-5)
        if not job.weights.any():
            np.testing.assert_array_equal(trained, model)
    if isinstance(learner, TorchLearner):
        assert together.called == (how != "mini-batches" and "chain" in name)


@pytest.mark.parametrize("name", CASES)
def test_a_mini_batch_without_weight_is_no_step(name: str, folder: Path) -> None:
    """Neither gradient, correction nor proximal pull moves the model then."""
    case = CASES[name]
    learner, local = case.learner(folder), LocalTraining(0.05, 2, batch_size=1, proximal=0.5)
    model, job = learner.initial(0), job_of(case, learner, 3, 2)
    job = TrainingJob(job.batch, np.array([0.0, 2.0, 0.0]), 4, job.correction)
    expected = WrittenOut(case, learner.gradient_size).trained(model, job, local)
    np.testing.assert_allclose(learner.train(model, job, local), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_correction_of_another_length_is_refused(name: str, folder: Path) -> None:
    case = CASES[name]
    learner = case.learner(folder)
    job = job_of(case, learner, 3, 2)
    wrong = TrainingJob(
        job.batch, job.weights, 0, np.ones(learner.gradient_size + 1, dtype=np.float32)
    )
    with pytest.raises(ValueError, match="broadcast"):
        learner.train(learner.initial(0), wrong, LocalTraining(0.1, 1))
