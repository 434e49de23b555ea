"""The task IC: Fashion-MNIST on devices that own a few labels each and very different numbers of images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedkeep.core.planning.assignment import apportion
from fedkeep.core.seeds import generator
from fedkeep.core.types import IntArray
from fedkeep.data.cache import Progress, RemoteFile, obtain, read_idx
from fedkeep.data.federation import Federation, ModelSpec, Ownership
from fedkeep.data.partition import Natural, partition_from

LABELS = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_ADDRESS = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
FILES = {
    name: RemoteFile(
        "fashion-mnist",
        f"{file}-ubyte.gz",
        f"{_ADDRESS}{file}-ubyte.gz",
        md5,
        "md5",
        "gzip content",
    )
    for name, file, md5 in (
        ("train-images", "train-images-idx3", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        ("train-labels", "train-labels-idx1", "9018921c3c673c538a1fc5bad174d6f9"),
        ("test-images", "t10k-images-idx3", "8181f5470baa50b63fa0f6fddb340f0a"),
        ("test-labels", "t10k-labels-idx1", "15d484375f8d13e6eb1aabb0c3f46965"),
    )
}


@dataclass(frozen=True)
class FashionMnist:
    """60,000 + 10,000 grey images of 28x28 in ten labels; fifty devices with five labels each by default."""

    partition: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "labels", "devices": 50, "labels": 5}
    )
    """How the pictures are divided among devices."""

    def __post_init__(self) -> None:
        if isinstance(partition_from(self.partition), Natural):
            raise ValueError(
                "partition.name must not be 'natural': Fashion-MNIST has no devices of its own"
            )

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        arrays = {name: read_idx(obtain(file, progress)) for name, file in FILES.items()}
        y_train, y_test = (arrays[f"{part}-labels"].astype(np.int64) for part in ("train", "test"))
        images = np.concatenate([arrays["train-images"], arrays["test-images"]])
        x = (images.astype(np.float32) / np.float32(255))[:, None]
        train = partition_from(self.partition).divide(y_train, None, seed)
        test = follow_labels(train, y_train, y_test, len(LABELS), seed)
        shifted = Ownership(test.indices + len(y_train), test.sizes)
        y = np.concatenate([y_train, y_test])
        return Federation("fashion-mnist", x, y, train, shifted, LABELS, ModelSpec("lenet"))


def follow_labels(
    train: Ownership, y_train: IntArray, y_test: IntArray, labels: int, seed: int
) -> Ownership:
    """Test samples shared out so that a device is tested on its own labels, as often as it trains on them."""
    counts, rng = train.counts(y_train, labels), generator(seed, "test-split")
    assignment = np.full(len(y_test), -1, dtype=np.int64)
    for label in range(labels):
        holders = np.flatnonzero(counts[:, label])
        samples = rng.permutation(np.flatnonzero(y_test == label))
        if len(holders):
            minimum = int(len(samples) >= len(holders))
            shares = apportion(len(samples), counts[holders, label].astype(np.float64), minimum)
            assignment[samples] = np.repeat(holders, shares)
    return Ownership.from_assignment(assignment, len(train))
