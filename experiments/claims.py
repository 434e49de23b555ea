"""The paper's claims about data values, measured: terms, stability, and what may replace values.

Values are taken on samples of the whole fleet, with the exact global gradient, along a run of FIFO
in the setting of Table 2.
"""

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from lab.results import write_figures

from fedkeep.config.experiment import override, read_experiment, resolve
from fedkeep.core.protocols import Learner, TrainingJob
from fedkeep.core.seeds import generator
from fedkeep.core.types import Batch, FloatArray, LocalTraining, Scores, Vector
from fedkeep.sim.assembly import build_learner
from fedkeep.sim.engine import Simulator
from fedkeep.sim.fleet import Oracle
from fedkeep.tables import Table

HERE = Path(__file__).parent
TASKS = ("ic", "har-balanced", "st", "st-all-labels")
"""Rows of Table 2."""
ROUNDS = (0, 5, 10, 15, 30, 60, 90)
SAMPLES = 1000
SUBSET = 2000
"""The samples that ODE-Exact takes its gradient over in Table 2."""
PLAYERS = 8


def setting(task: str, *, quick: bool) -> Table:
    """Table 2's setting of a task, under FIFO."""
    small = (
        ["task.devices=10", "task.smallest=60", "task.largest=80"]
        if quick and task.startswith("st")
        else []
    )
    table = override(read_experiment(HERE / "table2" / f"{task}.toml"), small)
    row = {key: value for key, value in table.items() if key not in {"methods", "sweep"}}
    return {**row, "policy": {"name": "fifo"}}


def measure(task: str, rounds: tuple[int, ...], *, quick: bool) -> dict[str, Any]:
    experiment = resolve(setting(task, quick=quick))
    simulator = Simulator(experiment)
    data, learner = simulator.parts.data, simulator.parts.learner
    head = build_learner(resolve({**setting(task, quick=quick), "model": {"last_layers": 1}}), data)
    ids = generator(0, "claims").choice(
        data.train.indices, min(SAMPLES, len(data.train.indices)), replace=False
    )
    batch = data.take(np.sort(ids))
    whole, part = Oracle(learner, data, None, 0), Oracle(learner, data, SUBSET, 0)
    values, tails, ratios, curvatures, subset = [], [], [], [], []
    for round_ in rounds:
        for _ in simulator.run(round_):
            pass
        model = simulator.server.model
        direction, partial = whole.gradient(model), part.gradient(model)
        seen = learner.probe(model).measure(batch)
        values.append(seen.projections(direction))
        subset.append(
            distance(partial, direction)
            | {"pearson": pearson(values[-1], seen.projections(partial))}
        )
        tails.append(
            head.probe(model)
            .measure(batch)
            .projections(Oracle(head, data, None, 0).gradient(model))
        )
        ratios.append(float(np.abs(values[-1]).mean() / (seen.norms() ** 2).mean()))
        curvatures.append(curvature(learner, model, batch.take(slice(None, None, 5))))
    # beta / alpha of Theorem 1, with the alpha that holds:
    # alpha = L zeta m eta^2 / (2 |B|), beta = zeta eta / |B|.
    return {
        "rounds": list(rounds),
        "term2_over_term1_raw": ratios,
        "curvature": curvatures,
        "term2_over_term1": [
            ratio
            * (
                2
                / (
                    max(smoothness, 1e-12)
                    * experiment.train.epochs
                    * experiment.train.learning_rate
                )
            )
            for ratio, smoothness in zip(ratios, curvatures, strict=True)
        ],
        "pearson_rounds": [[pearson(a, b) for b in values] for a in values],
        "exact_on_a_subset": subset,
        "pearson_last_layer": [pearson(a, b) for a, b in zip(values, tails, strict=True)],
        "look_ahead": look_ahead(
            learner, data.take(data.train.indices), direction, simulator, quick=quick
        ),
    }


def distance(estimate: Vector, truth: Vector) -> dict[str, float]:
    """The error of an estimate relative to the length of the truth, and the cosine of the two."""
    lengths = np.linalg.norm(estimate), np.linalg.norm(truth)
    error = np.linalg.norm(estimate - truth) / lengths[1]
    return {"error": float(error), "cosine": float(estimate @ truth / (lengths[0] * lengths[1]))}


def curvature(learner: Learner, model: Vector, batch: Batch, steps: int = 12) -> float:
    """The largest eigenvalue of the loss's Hessian on a batch, by power iteration."""
    rng = np.random.default_rng(0)
    way = rng.normal(size=len(model))
    here = learner.probe(model).measure(batch).mean_gradient().astype(np.float64)
    size = 0.0
    for _ in range(steps):
        way /= np.linalg.norm(way)
        step = 1e-2
        there = (
            learner.probe((model + step * way).astype(np.float32)).measure(batch).mean_gradient()
        )
        way = (there.astype(np.float64) - here) / step
        size = float(np.linalg.norm(way))
    return size


def look_ahead(
    learner: Learner, pool: Batch, direction: Vector, simulator: Simulator, *, quick: bool
) -> dict[str, Any]:
    """How the one-step value ranks eight samples: leave-one-out and exact Shapley values."""
    experiment, model = simulator.experiment, simulator.server.model
    local = LocalTraining(experiment.train.learning_rate, 1)
    rng = np.random.default_rng(1)
    found: dict[str, list[float]] = {"leave_one_out": [], "shapley": []}
    for _ in range(2 if quick else 20):
        players = pool.take(np.sort(rng.choice(len(pool), PLAYERS, replace=False)))
        utility = utilities(learner, model, players, direction, local, experiment.train.epochs)
        one_step = learner.probe(model).measure(players).projections(direction)
        found["leave_one_out"].append(pearson(one_step, leave_one_out(utility)))
        found["shapley"].append(pearson(one_step, shapley(utility)))
    return {
        name: {"mean": float(np.mean(rows)), "worst": min(rows), "draws": len(rows)}
        for name, rows in found.items()
    }


def utilities(
    learner: Learner,
    model: Vector,
    players: Batch,
    direction: Vector,
    local: LocalTraining,
    epochs: int,
) -> FloatArray:
    """Term 2 of Theorem 1 for every subset of players (bit masks), summed over local epochs."""
    utility = np.zeros(2 ** len(players))
    for mask in range(1, len(utility)):
        subset = players.take(np.array([i for i in range(len(players)) if mask >> i & 1]))
        here = model
        for _ in range(epochs):
            utility[mask] += float(learner.probe(here).measure(subset).projections(direction).sum())
            here = learner.train(here, TrainingJob(subset, np.ones(len(subset)), 0), local)
    return utility


def leave_one_out(utility: FloatArray) -> Scores:
    everyone = len(utility) - 1
    return np.array(
        [
            utility[everyone] - utility[everyone & ~(1 << i)]
            for i in range(int(math.log2(len(utility))))
        ]
    )


def shapley(utility: FloatArray) -> Scores:
    """The exact Shapley value of every player."""
    n = int(math.log2(len(utility)))
    values = np.zeros(n)
    for i, size in itertools.product(range(n), range(n)):
        share = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
        for others in itertools.combinations([j for j in range(n) if j != i], size):
            mask = sum(1 << j for j in others)
            values[i] += share * (utility[mask | 1 << i] - utility[mask])
    return values


def pearson(a: Scores, b: Scores) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="the folder that claims.json goes to"
    )
    parser.add_argument("--tasks", nargs="*", default=None, choices=TASKS)
    parser.add_argument("--quick", action="store_true", help="the synthetic task alone, tiny")
    options = parser.parse_args()
    tasks = options.tasks or (("st",) if options.quick else TASKS)
    found: dict[str, Any] = {}
    for task in tasks:
        row = measure(task, (0, 2) if options.quick else ROUNDS, quick=options.quick)
        found[task] = row
        write_figures("claims", options.out, {"samples": SAMPLES, "subset": SUBSET, "tasks": found})
        shown = ("term2_over_term1", "pearson_last_layer", "look_ahead")
        print(task, {key: row[key] for key in shown}, flush=True)


if __name__ == "__main__":
    main()
