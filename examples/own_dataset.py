"""Your own data: samples with labels and devices in one file, and what the devices should keep of them.

    python examples/own_dataset.py

docs/own-data.md tells the rest: CSV, Parquet, Python functions, partitions, models.
"""

import tempfile
from pathlib import Path

import numpy as np

from fedkeep.config.experiment import resolve
from fedkeep.sim.engine import Simulator


def record_pumps(path: Path, pumps: int = 12, samples: int = 4_000) -> None:
    """What you would have recorded: three sensors, four conditions, of which two are rare."""
    rng = np.random.default_rng(0)
    condition = rng.choice(4, samples, p=[0.8, 0.15, 0.03, 0.02])
    centres = np.array([[40, 0.02, 3.0], [44, 0.10, 3.2], [48, 0.25, 3.4], [55, 0.12, 4.0]])
    x = centres[condition] + rng.normal(size=(samples, 3)) * [2.0, 0.05, 0.2]
    np.savez(path, x=x.astype(np.float32), y=condition, device=rng.integers(0, pumps, samples))


def final_accuracy(path: Path, policy: str) -> float:
    experiment = resolve(
        {
            "task": {"name": "custom", "path": str(path), "rounds_per_pass": 60},
            "storage": {"capacity": 8},
            "policy": {"name": policy},
            "train": {"rounds": 60, "participation": 0.25, "learning_rate": 0.3},
        }
    )
    return [
        record.evaluation.accuracy for record in Simulator(experiment).run() if record.evaluation
    ][-1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pumps.npz"
        record_pumps(path)
        for policy in ("fifo", "reservoir", "ode", "full-data"):
            print(f"{policy:10} {final_accuracy(path, policy):.1%}")
