"""FedBoost in a fleet with small stores: devices learn which of eight predictors to trust.

The predictors are fixed, each trained on one device of another fleet, half of them on labels that
are mostly wrong. Devices with ten samples each find out how to mix them, sent three a round.
Run it from the repository's folder: `python examples/fedboost.py`.
"""

import tempfile
from pathlib import Path

import numpy as np

from fedkeep.config.experiment import resolve
from fedkeep.core.protocols import TrainingJob
from fedkeep.core.types import Batch, LocalTraining
from fedkeep.data.synthetic import Demo
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.sim.engine import Simulator


def main() -> None:
    elsewhere = Demo(devices=8).load(seed=1)
    net = DenseLearner((30, 10))
    models = []
    for device in range(8):
        batch = elsewhere.train_batch(device)
        wrong = np.random.default_rng(device).random(len(batch)) < (0.7 if device % 2 else 0.0)
        labels = np.where(wrong, (batch.y + 3) % 10, batch.y)
        job = TrainingJob(Batch(batch.x, labels, batch.ids), np.ones(len(batch)), seed=0)
        models.append(net.train(net.initial(device), job, LocalTraining(0.1, epochs=200)))

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base.npz")
        np.savez(base, models=np.stack(models), hidden=np.array([], dtype=np.int64))
        simulator = Simulator(
            resolve(
                {
                    "task": {"name": "demo", "devices": 20},
                    "model": {
                        "name": "fedboost",
                        "predictors": str(base),
                        "sampled": 3,
                    },
                    "policy": {"name": "fifo"},
                    "train": {"rounds": 100, "participation": 0.2, "learning_rate": 0.05},
                    "record": {"every": 25},
                }
            )
        )
        print(f"alike     accuracy {simulator.evaluate().accuracy:.1%}")
        for record in simulator.run():
            if record.evaluation:
                print(f"round {record.round:3} accuracy {record.evaluation.accuracy:.1%}")
        weights = " ".join(f"{weight:.2f}" for weight in simulator.server.model)
        print(f"weights of the predictors, every other one taught wrong: {weights}")


if __name__ == "__main__":
    main()
