"""Your own data: samples with labels and devices in one file, and what the devices should keep.

    python examples/own_dataset.py

docs/own-data.md tells the rest: CSV, Parquet, Python functions, partitions, models.
"""

import numpy as np

import fedkeep


def record_pumps(pumps: int = 12, samples: int = 4_000) -> tuple[np.ndarray, ...]:
    """Return what you would have recorded: three sensors, four conditions, two of them rare."""
    rng = np.random.default_rng(0)
    condition = rng.choice(4, samples, p=[0.8, 0.15, 0.03, 0.02])
    centres = np.array([[40, 0.02, 3.0], [44, 0.10, 3.2], [48, 0.25, 3.4], [55, 0.12, 4.0]])
    x = centres[condition] + rng.normal(size=(samples, 3)) * [2.0, 0.05, 0.2]
    names = np.array(["ok", "worn", "leaking", "broken"])[condition]
    return x, names, rng.integers(0, pumps, samples)


if __name__ == "__main__":
    x, condition, pump = record_pumps()
    found = fedkeep.compare(
        x,
        condition,
        pump,
        methods=["fifo", "reservoir", "default", "full-data"],
        capacity=8,
        rounds=60,
        participation=0.25,
        learning_rate=0.3,
    )
    print(found)
