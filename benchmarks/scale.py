"""What a large fleet costs the server.

Memory per device of the kept g_hat_c, and time per round to merge them. Measured on a fleet small
enough for a laptop. Memory grows with the devices and with the length of an estimate, so a million
follows by multiplication (docs/scale.md).
"""

import argparse
import json
import tracemalloc
from pathlib import Path
from time import process_time

import numpy as np

from fedkeep.core.gradients import Estimate, IncrementalEstimator
from fedkeep.learn.models import learner_for

MODELS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "softmax, 60 features, 10 labels": ("softmax", (60,), 10),
    "dense 900-100-5": ("mlp", (900,), 5),
    "LeNet, 28x28, 10 labels": ("lenet", (1, 28, 28), 10),
    "traffic CNN, 3x64, 20 labels": ("traffic-cnn", (3, 64), 20),
}


def lengths(name: str, shape: tuple[int, ...], classes: int) -> tuple[int, int]:
    """The length of a model, and of a gradient over the last layer alone."""
    return learner_for(name, shape, classes).size, learner_for(
        name, shape, classes, last_layers=1
    ).gradient_size


def memory(devices: int, length: int) -> float:
    """Bytes that the estimator keeps per device, over those of the estimate itself."""
    tracemalloc.start()
    estimator = IncrementalEstimator()
    for device in range(devices):
        estimator.update({device: Estimate(np.ones(length, dtype=np.float32), 1.0, 0)})
    estimator.direction()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / devices / (4 * length)


def merge_seconds(devices: int, participants: int, length: int) -> float:
    """Processor seconds to take in one round's estimates and to give the new direction."""
    estimator = IncrementalEstimator()
    shared = np.ones(length, dtype=np.float32)
    estimator.update({device: Estimate(shared, 1.0, 0) for device in range(devices)})
    estimator.direction()
    chosen = np.random.default_rng(0).choice(devices, participants, replace=False)
    news = {int(device): Estimate(shared + 1, 1.0, 1) for device in chosen}
    started = process_time()
    estimator.update(news)
    estimator.direction()
    return process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the devices")
    options = parser.parse_args()
    devices = 2_000 if options.quick else 20_000
    figures: dict[str, float] = {}
    print(f"{'model':<34}{'P':>9}{'last layer':>12}")
    for title, (name, shape, classes) in MODELS.items():
        size, head = lengths(name, shape, classes)
        figures |= {f"{name}_size": size, f"{name}_last_layer": head}
        print(f"{title:<34}{size:>9,}{head:>12,}")
    figures["memory_over_estimate"] = memory(devices // 4, 1_000)
    print(f"memory kept, over the estimates alone: {figures['memory_over_estimate']:.2f}x")
    for length in (850, 4_000):
        key = f"merge_{length}_seconds"
        figures[key] = merge_seconds(devices, devices // 20, length)
        print(
            f"merging {devices // 20} of {devices} estimates of {length}:"
            f" {figures[key]:.2f} s of the processor"
        )
    if options.json:
        options.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
