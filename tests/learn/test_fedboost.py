"""FedBoost against a loop that writes its formulas out, as a learner among others.

And in a simulation by its name.
"""

from pathlib import Path

import numpy as np
import pytest

from fedkeep.config.experiment import resolve
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.protocols import TrainingJob
from fedkeep.core.types import Batch, LocalTraining
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.fedboost import FedBoost
from fedkeep.sim.engine import Simulator
from fedkeep.testing import check_learner

FEATURES, CLASSES, PREDICTORS = 5, 3, 6
NET = DenseLearner((FEATURES, 4, CLASSES))


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Six networks as they are first made, which differ enough."""
    models = np.stack([3 * NET.initial(seed) for seed in range(PREDICTORS)])
    np.savez(tmp_path / "base.npz", models=models, hidden=[4])
    return str(tmp_path / "base.npz")


def samples(n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        rng.normal(size=(n, FEATURES)).astype("f4"), rng.integers(0, CLASSES, n), np.arange(n)
    )


def written_out(
    learner: FedBoost, alpha: list[float], job: TrainingJob, local: LocalTraining
) -> list[float]:
    """Sample by sample, predictor by predictor."""
    factors = learner.drawn(np.array(alpha), job.seed).tolist()
    predicted = learner.predicted(job.batch.x).tolist()
    first, q = list(alpha), len(alpha)
    for _ in range(local.epochs):
        gradient = [0.0] * q
        for i, y in enumerate(job.batch.y.tolist()):
            mixed = sum(alpha[k] * factors[k] * predicted[k][i][y] for k in range(q))
            for k in range(q):
                gradient[k] -= (
                    job.weights[i] / sum(job.weights) * factors[k] * predicted[k][i][y] / mixed
                )
        for k in range(q):
            gradient[k] += job.correction[k] + local.proximal * (alpha[k] - first[k])  # type: ignore[index]
        powers = [
            a * np.exp(-local.learning_rate * g) for a, g in zip(alpha, gradient, strict=True)
        ]
        alpha = [power / sum(powers) for power in powers]
    return alpha


@pytest.mark.parametrize("sampling", ["weighted", "uniform"])
@pytest.mark.parametrize("sampled", [None, 3])
def test_a_device_trains_by_the_formula(base: str, sampled: int | None, sampling: str) -> None:
    learner = FedBoost((FEATURES,), CLASSES, predictors=base, sampled=sampled, sampling=sampling)
    rng = np.random.default_rng(2)
    alpha = rng.dirichlet(np.ones(PREDICTORS))
    weights = np.array([1.0, 0.5, 2.0, 0.0, 1.0, 1.0, 3.0])
    job = TrainingJob(
        samples(7), weights, seed=4, correction=0.1 * rng.normal(size=PREDICTORS).astype("f4")
    )
    local = LocalTraining(0.3, epochs=4, proximal=0.2)
    trained = learner.train(alpha.astype("f4"), job, local)
    np.testing.assert_allclose(
        trained, written_out(learner, alpha.tolist(), job, local), rtol=0, atol=1e-5
    )
    assert trained.sum() == pytest.approx(1.0, abs=1e-5)
    assert np.abs(trained - alpha).max() > 1e-2


def test_it_satisfies_the_invariants_of_learners(base: str) -> None:
    assert "finite-differences" in check_learner(
        FedBoost((FEATURES,), CLASSES, predictors=base), samples(40)
    )


def test_a_predictor_is_sent_by_its_weight_and_counts_on_average_as_if_all_were(base: str) -> None:
    learner = FedBoost((FEATURES,), CLASSES, predictors=base, sampled=2)
    alpha = np.array([0.6, 0.2, 0.1, 0.05, 0.03, 0.02])
    drawn = np.stack([learner.drawn(alpha, seed) for seed in range(4000)])
    np.testing.assert_allclose((drawn > 0).mean(axis=0), np.minimum(1, 2 * alpha), atol=0.03)
    np.testing.assert_allclose(drawn.mean(axis=0), 1, atol=0.3)
    alike = FedBoost((FEATURES,), CLASSES, predictors=base, sampled=2, sampling="uniform")
    often = np.mean([alike.drawn(alpha, seed) > 0 for seed in range(4000)], axis=0)
    np.testing.assert_allclose(often, 2 / PREDICTORS, atol=0.03)


def test_what_is_impossible_is_reported_in_a_sentence(base: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no predictors"):
        FedBoost((FEATURES,), CLASSES, predictors=str(tmp_path / "nothing.npz"))
    with pytest.raises(DataError, match="does not fit: a predictor of this data has"):
        FedBoost((FEATURES + 1,), CLASSES, predictors=base)
    with pytest.raises(ConfigError, match="sampled must be above 0"):
        FedBoost((FEATURES,), CLASSES, predictors=base, sampled=0)
    model = {"name": "fedboost", "predictor": base}
    with pytest.raises(
        ConfigError,
        match=r"model 'fedboost' takes .* unexpected keyword argument 'predictor'",
    ):
        Simulator(resolve({"task": {"name": "demo"}, "model": model}))
    layered = {"name": "fedboost", "predictors": base, "last_layers": 1}
    with pytest.raises(ConfigError, match="'fedboost' has no layers"):
        Simulator(resolve({"task": {"name": "demo"}, "model": layered}))


@pytest.mark.parametrize("policy", ["fifo", "ode", "balanced-reservoir"])
def test_any_policy_keeps_samples_for_it(tmp_path: Path, policy: str) -> None:
    """`balanced-reservoir` comes with the gist.

    It corrects the steps of the mixture's weights like any others.
    """
    net = DenseLearner((30, 10))
    np.savez(
        tmp_path / "base.npz", models=np.stack([net.initial(seed) for seed in range(4)]), hidden=[]
    )
    model = {
        "name": "fedboost",
        "predictors": str(tmp_path / "base.npz"),
        "sampled": 2,
    }
    table = {
        "task": {"name": "demo", "devices": 8},
        "policy": {"name": policy},
        "train": {"rounds": 4},
    }
    simulator = Simulator(resolve(table | {"model": model}))
    *_, last = simulator.run()
    assert last.evaluation is not None
    assert np.isfinite(last.evaluation.loss)
    assert simulator.server.model.sum() == pytest.approx(1.0, abs=1e-3)
