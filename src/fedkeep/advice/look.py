"""A first look at a fleet's data: what it is like, and what of it deserves worry."""

from collections.abc import Iterator

import numpy as np

from fedkeep.core.seeds import generator
from fedkeep.core.types import FloatArray, IntArray
from fedkeep.data import Federation

_NEIGHBOURS = 5
_LOOKED_AT = 1500
"""Samples whose neighbours are looked for: enough for a share, few enough for seconds."""


class Look:
    """A fleet's data in figures: what can be counted without training anything.

    >>> from fedkeep.data import TASKS
    >>> seen = Look(TASKS["embedded"](devices=5).load(seed=0))
    >>> seen.labels_per_device, seen.sample_bytes
    ((9, 10, 10), 120)
    """

    def __init__(self, data: Federation, seed: int = 0) -> None:
        counts = data.label_counts
        shares = counts.sum(axis=0) / counts.sum()
        rng = generator(seed, "look")
        ordered = [data.y[data.train.of(d)] for d in range(data.devices)]
        shuffled = [rng.permutation(labels) for labels in ordered]
        self.devices, self.labels = data.devices, data.labels
        self.samples, self.tested = len(data.train.indices), len(data.test.indices)
        """For training, and for testing."""
        self.labels_per_device, self.samples_per_device = (
            (int(values.min()), int(np.median(values)), int(values.max()))
            for values in ((counts > 0).sum(axis=1), data.train.sizes)
        )
        """The fewest, the median and the most."""
        self.rarest, self.commonest = (
            (data.label_names[n], float(shares[n])) for n in (int(shares.argmin()), int(shares.argmax()))
        )
        """A label and its share of the samples."""
        self.sample_bytes = int(data.x[:1].nbytes)
        self.drift, self.drift_by_chance = (_halves_apart(labels, data.labels) for labels in (ordered, shuffled))
        """How far the labels of the first and the second half of a device's rows lie apart, and what the same rows in
        random order would show: 0 alike, 1 nothing shared."""
        self.runs, self.runs_by_chance = map(_repeats, (ordered, shuffled))
        """How often a device's next row has the label of the one before."""
        self.doubtful = _contradicted(data, rng)
        """The share of labels that all nearest neighbours agree to contradict."""


def describe(seen: Look) -> str:
    """The figures as a sentence or two."""
    low, middle, high = seen.labels_per_device
    few, usual, many = seen.samples_per_device
    return (
        f"{seen.devices} devices with {usual} samples each ({few} to {many}), {seen.labels} labels of which a device "
        f"sees {middle} ({low} to {high}); label '{seen.commonest[0]}' is {seen.commonest[1]:.0%} of all, "
        f"'{seen.rarest[0]}' {seen.rarest[1]:.1%}. A sample takes {seen.sample_bytes:,} bytes."
    )


def worries(seen: Look, capacity: int, *, shuffled: bool) -> Iterator[str]:
    """What may spoil an advice on this data, or the use of it."""
    if capacity >= seen.samples_per_device[1]:
        yield (
            f"Half of the devices can keep all that they have here, with room for {capacity} samples: there is nothing "
            "to choose. Give more of the data, or advise again with a smaller store."
        )
    if not shuffled and seen.drift > seen.drift_by_chance + 0.1:
        yield (
            "The order of the rows matters: the labels of the first and the second half of a device lie "
            f"{seen.drift:.2f} apart ({seen.drift_by_chance:.2f} by chance). If that order is not time, advise again "
            "with --shuffled."
        )
    if not shuffled and seen.runs > seen.runs_by_chance + 0.1:
        yield (
            f"Labels come in runs: {seen.runs:.0%} of rows repeat the label before ({seen.runs_by_chance:.0%} by "
            "chance), so the newest samples are much alike."
        )
    if seen.doubtful > 0.03:
        yield f"About {seen.doubtful:.0%} of the labels look doubtful: their nearest samples contradict them."
    if seen.rarest[1] < 0.02:
        yield f"Label '{seen.rarest[0]}' is rare ({seen.rarest[1]:.1%}): overall accuracy hardly shows how it fares."
    if seen.labels_per_device[1] < seen.labels:
        yield f"Half of the devices see at most {seen.labels_per_device[1]} of the {seen.labels} labels."
    if seen.tested < 500:
        yield f"Only {seen.tested} samples are for testing: a point of accuracy is {seen.tested / 100:.1f} of them."
    if seen.devices < 5:
        yield f"{seen.devices} devices are few for federated learning: what holds for them may not hold for a fleet."


def _halves_apart(labels: list[IntArray], count: int) -> float:
    """The total variation between the label mixes of first and second halves, the devices by their sizes."""
    apart, weight = 0.0, 0
    for own in labels:
        middle = len(own) // 2
        if middle:
            first, second = (np.bincount(half, minlength=count) / len(half) for half in (own[:middle], own[middle:]))
            apart += len(own) * float(np.abs(first - second).sum()) / 2
            weight += len(own)
    return apart / weight if weight else 0.0


def _repeats(labels: list[IntArray]) -> float:
    alike = sum(int((own[1:] == own[:-1]).sum()) for own in labels)
    pairs = sum(len(own) - 1 for own in labels)
    return alike / pairs if pairs else 0.0


def _contradicted(data: Federation, rng: np.random.Generator) -> float:
    chosen = rng.permutation(data.train.indices)[:_LOOKED_AT]
    x: FloatArray = data.x[chosen].reshape(len(chosen), -1).astype(np.float64)
    y = data.y[chosen]
    if len(chosen) <= _NEIGHBOURS:
        return 0.0
    square = (x**2).sum(axis=1)
    distances = square[:, None] + square[None, :] - 2 * x @ x.T
    np.fill_diagonal(distances, np.inf)
    nearest = y[np.argpartition(distances, _NEIGHBOURS, axis=1)[:, :_NEIGHBOURS]]
    agreed = (nearest == nearest[:, :1]).all(axis=1)
    return float((agreed & (nearest[:, 0] != y)).mean())
