"""Theorems 1 and 2 and Lemma 1 in numbers, on the synthetic task with softmax regression.

For softmax regression half the largest eigenvalue of the inputs' second moment bounds the Hessian
everywhere, so L is known and every inequality can be checked as it stands.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from lab.results import write_figures

from fedkeep.config.experiment import override, read_experiment, resolve
from fedkeep.core.protocols import FleetLearner, TrainingJob
from fedkeep.core.types import Batch, FloatArray, LocalTraining, Vector
from fedkeep.data import Federation
from fedkeep.sim.assembly import build_learner
from fedkeep.sim.engine import Simulator, evaluate
from fedkeep.tables import Table

HERE = Path(__file__).parent
CAPACITY = 10
RATES = (1e-4, 1e-3, 1e-2, 1e-1)
EPOCHS = (1, 5, 10)
SHARES = (1, 2, 10)
"""Devices that take part: zeta is one over their number."""
METHODS = ("fifo", "reservoir", "high-loss", "gradient-norm", "ode", "full-data")


def setting(*, quick: bool) -> Table:
    devices, smallest, largest, rounds = (10, 60, 80, 4) if quick else (40, 500, 600, 200)
    size = [f"task.devices={devices}", f"task.smallest={smallest}", f"task.largest={largest}"]
    run = [
        "train.participation=0.25",
        f"train.rounds={rounds}",
        "train.decay=1.0",
        "stream.rounds_per_pass=40",
    ]
    return override(read_experiment(HERE / "tasks" / "st-all-labels.toml"), size + run)


class Scene:
    """A model, the whole fleet's data, and the smoothness of its loss."""

    def __init__(self, data: Federation, learner: FleetLearner, samples: int) -> None:
        known = data.train.indices
        ids = np.random.default_rng(0).choice(known, min(samples, len(known)), replace=False)
        self.learner, self.everything = learner, data.take(np.sort(ids))
        inputs = np.concatenate([np.ones((len(ids), 1)), self.everything.x], axis=1)
        self.smoothness = 0.5 * float(np.linalg.eigvalsh(inputs.T @ inputs / len(inputs))[-1])

    def loss(self, model: Vector) -> float:
        return float(self.learner.probe(model).measure(self.everything).losses().mean())

    def gradient(self, model: Vector) -> FloatArray:
        return self.learner.probe(model).measure(self.everything).mean_gradient().astype(np.float64)

    def gradients(self, model: Vector, batch: Batch) -> FloatArray:
        """Every sample's gradient, (n, P)."""
        probe = self.learner.probe(model)
        return np.stack(
            [probe.measure(batch.take(slice(i, i + 1))).mean_gradient() for i in range(len(batch))]
        )


def local_steps(here: Scene, model: Vector, batch: Batch, rate: float, epochs: int) -> list[Vector]:
    """w^{t,0}, w^{t,1}, ..., w^{t,m}."""
    path = [model]
    for _ in range(epochs):
        path.append(
            here.learner.train(
                path[-1], TrainingJob(batch, np.ones(len(batch)), 0), LocalTraining(rate, 1)
            )
        )
    return path


def check_loss_reduction(
    here: Scene, data: Federation, model: Vector, draws: int
) -> dict[str, Any]:
    """How often each printed constant's bound exceeds the true reduction of the loss."""
    rng = np.random.default_rng(1)
    broken = {"paper": 0, "appendix": 0, "corrected": 0}
    excess: dict[str, float] = dict.fromkeys(broken, 0.0)
    direction, before = here.gradient(model), here.loss(model)
    cases = list(itertools.product(RATES, EPOCHS, SHARES, range(draws)))
    for rate, epochs, k, _ in cases:
        stores = [draw_store(data, rng) for _ in range(k)]
        paths = [local_steps(here, model, store, rate, epochs) for store in stores]
        merged = np.mean([path[-1].astype(np.float64) for path in paths], axis=0).astype(np.float32)
        reduction = before - here.loss(merged)
        squares, projections = terms(here, paths, stores, direction)
        for name, alpha in constants(here.smoothness, rate, epochs, 1 / k).items():
            over = -alpha * squares + rate / (k * CAPACITY) * projections - reduction
            broken[name] += over > 1e-6 + 1e-4 * abs(reduction)
            excess[name] = max(excess[name], over)
    return {
        "checks": len(cases),
        "broken": {n: int(b) for n, b in broken.items()},
        "largest_excess": excess,
    }


def constants(smoothness: float, rate: float, epochs: int, share: float) -> dict[str, float]:
    """alpha_c as printed in the paper and its appendix, and with the factor the proof drops."""
    return {
        "paper": smoothness / (2 * share) * (rate / CAPACITY) ** 2,
        "appendix": smoothness * share * rate**2 / (2 * CAPACITY**2),
        "corrected": smoothness * share * epochs * rate**2 / (2 * CAPACITY),
    }


def terms(
    here: Scene, paths: list[list[Vector]], stores: list[Batch], direction: FloatArray
) -> tuple[float, float]:
    """Term 1 and term 2 of Theorem 1, summed over devices, local epochs and samples."""
    squares = projections = 0.0
    for path, store in zip(paths, stores, strict=True):
        for model in path[:-1]:
            seen = here.learner.probe(model).measure(store)
            squares += float((seen.norms() ** 2).sum())
            projections += float(seen.projections(direction.astype(np.float32)).sum())
    return squares, projections


def draw_store(data: Federation, rng: np.random.Generator) -> Batch:
    owned = data.train.of(int(rng.integers(data.devices)))
    return data.take(rng.choice(owned, CAPACITY, replace=False))


def check_divergence(here: Scene, data: Federation, model: Vector, draws: int) -> dict[str, Any]:
    """Lemma 1 and Theorem 2, each with how near its bound comes to the truth."""
    rng = np.random.default_rng(2)
    lemma, theorem, broken = [], [], {"lemma1": 0, "theorem2": 0}
    for _ in range(draws):
        store, rate, epochs = (
            draw_store(data, rng),
            float(rng.choice(RATES[:3])),
            int(rng.choice(EPOCHS)),
        )
        whole = here.gradient(model)
        each = here.gradients(model, store).astype(np.float64)
        actual = float(np.linalg.norm(each.mean(axis=0) - whole))
        bound = float(np.sqrt(whole @ whole + ((each**2).sum(axis=1) - 2 * each @ whole).mean()))
        lemma.append(bound / actual)
        broken["lemma1"] += bound < actual * (1 - 1e-5)
        ours = local_steps(here, model, store, rate, epochs)
        central = local_steps(here, model, here.everything, rate, epochs)
        apart = float(np.linalg.norm(ours[-1].astype(np.float64) - central[-1]))
        growth, limit = 1 + rate * here.smoothness, 0.0
        for place, at in enumerate(ours[:-1]):
            own = here.learner.probe(at).measure(store).mean_gradient()
            limit += (
                rate
                * growth ** (epochs - 1 - place)
                * float(np.linalg.norm(own - here.gradient(at)))
            )
        theorem.append(limit / apart)
        broken["theorem2"] += limit < apart * (1 - 1e-4)
    return {
        "checks": draws,
        "broken": {name: int(count) for name, count in broken.items()},
        "lemma1_bound_over_truth_median": float(np.median(lemma)),
        "theorem2_bound_over_truth_median": float(np.median(theorem)),
    }


def distances(table: Table, seeds: tuple[int, ...], every: int) -> dict[str, Any]:
    """Each method's distance from the centrally trained model after as many steps; accuracies."""
    found: dict[str, Any] = {}
    reference: list[list[FloatArray]] = []
    for method in ("central", *METHODS):
        models, accuracies = [], []
        for seed in seeds:
            part = {"policy": {"name": method}, "preset": "paper", "seed": seed}
            part["coordinator"] = {**table.get("coordinator", {}), "unassigned": "fill"}
            if method == "central":
                part["train"] = {**table["train"], "participation": 1.0}
            simulator = Simulator(resolve({**table, **part}))
            models.append(
                [
                    simulator.server.model.astype(np.float64)
                    for r in simulator.run()
                    if r.round % every == 0
                ]
            )
            accuracies.append(
                evaluate(
                    simulator.parts.learner, simulator.server.model, simulator.parts.data
                ).accuracy
            )
        reference = reference or models
        apart = [
            [float(np.linalg.norm(a - b)) for a, b in zip(own, central, strict=True)]
            for own, central in zip(models, reference, strict=True)
        ]
        found[method] = {
            "rounds": [every * (n + 1) for n in range(len(models[0]))],
            "distance": np.mean(apart, axis=0).tolist(),
            "accuracy": float(np.mean(accuracies)),
        }
    found["central"] = {"accuracy": found["central"]["accuracy"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="the folder that theory.json goes to"
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    table = setting(quick=options.quick)
    experiment = resolve({**table, "policy": {"name": "fifo"}})
    data = experiment.task.load(0)
    learner = build_learner(experiment, data)
    here = Scene(data, learner, 200 if options.quick else 2000)
    model = learner.initial(0)
    figures = {
        "smoothness": here.smoothness,
        "theorem1": check_loss_reduction(here, data, model, 1 if options.quick else 10),
        "divergence": check_divergence(here, data, model, 4 if options.quick else 100),
        "theorem2_distance": distances(
            table, (0,) if options.quick else (0, 1, 2), 2 if options.quick else 20
        ),
    }
    write_figures("theory", options.out, figures)
    print(json.dumps({key: figures[key] for key in ("theorem1", "divergence")}, indent=1))


if __name__ == "__main__":
    main()
