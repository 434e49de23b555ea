"""The task IC: Fashion-MNIST on devices with a few labels each and very different sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedkeep.core.planning.assignment import apportion
from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, IntArray
from fedkeep.data.cache import Progress, RemoteFile, obtain, read_idx
from fedkeep.data.federation import Federation, ModelSpec, Ownership
from fedkeep.data.partition import Natural, partition_from

LABELS = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
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
    """60,000 + 10,000 grey images of 28x28 in ten labels.

    By default fifty devices, five labels each.
    """

    partition: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "labels", "devices": 50, "labels": 5}
    )
    """How the pictures are divided among devices."""
    pixels: Literal["unit", "standardised"] = "unit"
    """`unit` is a pixel's grey over 255; `standardised` each pixel less its mean over the training
    pictures, in standard deviations, as in the recipe that the partition comes from (FedProx)."""

    def __post_init__(self) -> None:
        if isinstance(partition_from(self.partition), Natural):
            raise ValueError(
                "partition.name must not be 'natural': Fashion-MNIST has no devices of its own"
            )

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        """Read the pictures and divide them.

        Parameters
        ----------
        seed : int
            What the division follows from.
        progress : callable, optional
            Called while a file is downloaded.

        Returns
        -------
        Federation
            With LeNet as its model.
        """
        arrays = {name: read_idx(obtain(file, progress)) for name, file in FILES.items()}
        y_train, y_test = (arrays[f"{part}-labels"].astype(np.int64) for part in ("train", "test"))
        images = np.concatenate([arrays["train-images"], arrays["test-images"]])
        if self.pixels == "standardised":
            x = standardised_pixels(images, len(y_train))[:, None]
        else:
            x = (images.astype(np.float32) / np.float32(255))[:, None]
        train = partition_from(self.partition).divide(y_train, None, seed)
        test = follow_labels(train, y_train, y_test, len(LABELS), seed)
        shifted = Ownership(test.indices + len(y_train), test.sizes)
        y = np.concatenate([y_train, y_test])
        return Federation("fashion-mnist", x, y, train, shifted, LABELS, ModelSpec("lenet"))


def follow_labels(
    train: Ownership, y_train: IntArray, y_test: IntArray, labels: int, seed: int
) -> Ownership:
    """Divide test samples so that a device is tested on its labels as often as it trains on them.

    Parameters
    ----------
    train : Ownership
        Who trains on what.
    y_train, y_test : ndarray of int
        Labels.
    labels : int
        How many labels there are.
    seed : int
        What the division follows from.

    Returns
    -------
    Ownership
        Test samples of each device.
    """
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


def standardised_pixels(images: AnyArray, known: int) -> AnyArray:
    """Bring each pixel to mean 0 and standard deviation 1 over the known pictures.

    Parameters
    ----------
    images : ndarray of uint8, shape (n, height, width)
        Greys, 0 to 255.
    known : int
        How many of them, from the first, are for training: the statistics are theirs.

    Returns
    -------
    ndarray of float32, shape (n, height, width)
        (x - mean) / (deviation + 0.001).

    References
    ----------
    FedProx, data/mnist/generate_niid.py, which takes the statistics over all pictures.

    Examples
    --------
    >>> images = np.array([[[0, 7]], [[100, 7]], [[200, 9]]], dtype=np.uint8)
    >>> standardised_pixels(images, known=2).round(2).tolist()
    [[[-1.0, 0.0]], [[1.0, 0.0]], [[3.0, 2000.0]]]
    """
    pixels = images.astype(np.float32)
    mean = pixels[:known].mean(axis=0, dtype=np.float64)
    deviation = pixels[:known].std(axis=0, dtype=np.float64) + 0.001
    return np.asarray((pixels - mean) / deviation, dtype=np.float32)
