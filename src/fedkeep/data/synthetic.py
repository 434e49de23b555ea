"""The task ST: LEAF's synthetic generator, to its sizes, labels and features.

LEAF (Caldas et al. 2018) draws with numpy's legacy RandomState; so does this file, in the same
order, and only here. With LEAF's own spread a device's samples lie so close together that nearly
all have one label and it hardly matters which of them are stored; a `spread` of 8 or more lets a
typical device see all ten labels, and so does `mixed`, which deals the samples of all devices anew.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, IntArray
from fedkeep.data.cache import Progress
from fedkeep.data.federation import Federation, ModelSpec, Ownership, hold_out


@dataclass(frozen=True)
class Synthetic:
    """Linear labelling rules over clusters of devices.

    The paper's sizes are near 5000 to 6000 samples.
    """

    devices: int = 200
    """How many devices the fleet has."""
    labels: int = 10
    """How many labels there are."""
    features: int = 60
    """How many numbers a sample has."""
    smallest: int = 5000
    """Added to a log-normal draw to make a device's size (LEAF's stock: 5)."""
    largest: int = 6000
    """Cap of a device's size (LEAF's stock: 1000)."""
    clusters: int = 1
    """Groups of devices with a labelling rule of their own; a linear model fits one of them."""
    spread: float = 1.0
    """Factor on the standard deviations of a device's samples around their centre; 1 is LEAF's."""
    generator_seed: int = 42
    """What the data itself follows from; the experiment's seed draws only splits."""
    test_fraction: float = 0.1
    """Held out in each device for testing."""
    mixed: float = 0.0
    """Share of all samples that are dealt anew over the devices, whose sizes stay: 0 is LEAF, where
    one label is most of a device; 1 deals evenly, so that every device sees all labels."""

    task_name: ClassVar[str] = "synthetic"
    usual_rounds_per_pass: ClassVar[int] = 400

    def __post_init__(self) -> None:
        check_range(self, "labels", least=2)
        check_range(self, "devices", "features", "smallest", "clusters", least=1)
        check_range(self, "spread", above=0)
        check_range(self, "test_fraction", above=0, below=1)
        check_range(self, "mixed", least=0, most=1)
        if self.largest < self.smallest:
            raise ValueError(
                f"largest must not be below smallest ({self.smallest}), got {self.largest}"
            )

    def load(self, seed: int, progress: Progress | None = None) -> Federation:  # noqa: ARG002
        """Generate the samples.

        Parameters
        ----------
        seed : int
            What the split into training and test follows from.
        progress : callable, optional
            Not used.

        Returns
        -------
        Federation
            With softmax regression as its model.
        """
        sizes = self.sizes()
        members = Ownership(np.arange(sizes.sum(), dtype=np.int64), sizes)
        x, y = self._samples(members)
        if self.mixed:
            members = replace(members, indices=deal(len(y), self.mixed, self.generator_seed))
        train, test = hold_out(members, self.test_fraction, seed)
        names = tuple(map(str, range(self.labels)))
        pace = self.usual_rounds_per_pass
        return Federation(
            self.task_name, x, y, train, test, names, ModelSpec("softmax"), rounds_per_pass=pace
        )

    def sizes(self) -> IntArray:
        """Draw the number of samples of each device.

        Returns
        -------
        ndarray of int, shape (C,)
            By LEAF's distribution, between the two sizes.
        """
        drawn = np.random.RandomState(self.generator_seed).lognormal(3, 2, self.devices)
        return np.minimum(drawn.astype(np.int64) + self.smallest, self.largest)

    def _samples(self, members: Ownership) -> tuple[AnyArray, IntArray]:
        rng = np.random.RandomState(self.generator_seed)
        q = rng.normal(0.0, 1.0, (self.features + 1, self.labels, self.clusters))
        means = [rng.normal(rng.normal(), 1.0, self.clusters) for _ in range(self.clusters)]
        # What RandomState.multivariate_normal multiplies by, worked out once for all devices.
        _, variances, axes = np.linalg.svd(np.diag(np.arange(1.0, self.features + 1) ** -1.2))
        root = self.spread * np.asarray(np.sqrt(variances)[:, None] * axes)
        x = np.empty((len(members.indices), self.features), dtype=np.float32)
        y = np.empty(len(x), dtype=np.int64)
        for start, stop in pairwise(members.offsets):
            cluster = int(rng.random_sample() * self.clusters)
            centre = rng.normal(rng.normal(), 1.0, self.features)
            drawn = rng.standard_normal((stop - start, self.features)) @ root + centre
            rule = q @ rng.normal(means[cluster], 0.1)
            logits = drawn @ rule[1:] + rule[0] + rng.normal(0.0, 0.1, (stop - start, self.labels))
            x[start:stop], y[start:stop] = drawn, np.argmax(logits, axis=1)
        return x, y


def deal(samples: int, share: float, seed: int) -> IntArray:
    """Deal a share of the samples anew: they change places with each other, the rest stays.

    Parameters
    ----------
    samples : int
        How many there are.
    share : float
        Which share of them is dealt, 0 to 1.
    seed : int
        What the dealing follows from.

    Returns
    -------
    ndarray of int, shape (samples,)
        The sample at each place.

    Examples
    --------
    >>> deal(4, 0.0, seed=1).tolist(), sorted(deal(4, 1.0, seed=1).tolist())
    ([0, 1, 2, 3], [0, 1, 2, 3])
    """
    rng = generator(seed, "deal")
    order = np.arange(samples, dtype=np.int64)
    places = np.flatnonzero(rng.random(samples) < share)
    order[places] = rng.permutation(places)
    return order


@dataclass(frozen=True)
class Demo(Synthetic):
    """A small fleet for `fedkeep demo`.

    Every device sees all labels, so that what it stores matters.

    >>> fleet = Demo(devices=8).load(seed=0)
    >>> fleet.devices, fleet.labels, fleet.sample_shape
    (8, 10, (30,))
    """

    devices: int = 40
    smallest: int = 400
    largest: int = 800
    features: int = 30
    spread: float = 8.0
    test_fraction: float = 0.2

    learning_rate: ClassVar[float] = 0.02
    """Where `train.learning_rate` is not set."""
    task_name: ClassVar[str] = "embedded"
    usual_rounds_per_pass: ClassVar[int] = 50
