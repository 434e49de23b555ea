"""FedBoost: eight predictors are fixed, and devices learn how to mix them from the ten samples that each stores.

Each predictor was trained on one device of another fleet, half of them on labels that are mostly wrong. To spare
the line, a device is sent three of them a round. Run it from the repository's folder.
"""

import tempfile
from pathlib import Path

import numpy as np

from fedkeep.core.ports import Job
from fedkeep.core.types import Batch, LocalTraining
from fedkeep.data.synthetic import Embedded
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.sim.engine import Simulator
from fedkeep.sim.experiment import resolve

elsewhere = Embedded(devices=8).load(seed=1)
net = DenseLearner((30, 10))
models = []
for device in range(8):
    batch = elsewhere.train_batch(device)
    wrong = np.random.default_rng(device).random(len(batch)) < (0.7 if device % 2 else 0.0)
    labels = np.where(wrong, (batch.y + 3) % 10, batch.y)
    job = Job(Batch(batch.x, labels, batch.ids), np.ones(len(batch)), seed=0)
    models.append(net.train(net.initial(device), job, LocalTraining(0.1, epochs=200)))

with tempfile.TemporaryDirectory() as folder:
    base = Path(folder, "base.npz")
    np.savez(base, models=np.stack(models), hidden=np.array([], dtype=np.int64))
    simulator = Simulator(
        resolve(
            {
                "task": {"name": "embedded", "devices": 20},
                "model": {"name": "experiments/lab/fedboost.py:FedBoost", "predictors": str(base), "sampled": 3},
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
