"""A data set in figures, without training: devices, labels, imbalance, order and label noise."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fedkeep.advice.noise import NoiseEstimate, wrong_labels
from fedkeep.core.seeds import generator
from fedkeep.core.types import IntArray
from fedkeep.data import Federation

_LOOKED_AT = 1500
"""Samples whose labels are checked: enough for a share, few enough for seconds."""
_NOISY = 0.02


class NumberRange(NamedTuple):
    """The numbers to predict, in their own units."""

    lowest: float
    mean: float
    highest: float
    deviation: float


class DatasetProfile:
    """The figures of a fleet's data.

    Examples
    --------
    >>> from fedkeep.data import TASKS
    >>> profile = DatasetProfile(TASKS["demo"](devices=5).load(seed=0))
    >>> profile.labels_per_device, profile.sample_bytes
    ((9, 10, 10), 120)
    """

    def __init__(self, data: Federation) -> None:
        counts = data.label_counts
        shares = counts.sum(axis=0) / counts.sum()
        rng = generator(0, "look")
        ordered = [data.strata[data.train.of(d)] for d in range(data.devices)]
        shuffled = [rng.permutation(labels) for labels in ordered]
        self.devices, self.labels, self.tested = data.devices, data.labels, len(data.test.indices)
        self.labels_per_device, self.samples_per_device = (
            (int(values.min()), int(np.median(values)), int(values.max()))
            for values in ((counts > 0).sum(axis=1), data.train.sizes)
        )
        """The fewest, the median and the most."""
        self.rarest, self.commonest = (
            (data.label_names[n], float(shares[n]))
            for n in (int(shares.argmin()), int(shares.argmax()))
        )
        """A label and its share of the samples."""
        self.sample_bytes = int(data.x[:1].nbytes)
        self.drift, self.drift_by_chance = (
            _halves_apart(labels, data.labels) for labels in (ordered, shuffled)
        )
        """Total variation between the labels of the first and second half of a device's rows."""
        self.runs, self.runs_by_chance = map(_repeats, (ordered, shuffled))
        """Share of a device's rows with the label of the row before."""
        chosen = rng.permutation(data.train.indices)[:_LOOKED_AT]
        self.noise = NoiseEstimate(0.0, 0.0, 0.0)
        """Share of wrong labels, estimated; none of numbers."""
        self.numbers: NumberRange | None = None
        """Of the targets, where they are numbers; labels are then their intervals."""
        if data.targets is None:
            self.noise = wrong_labels(data.x[chosen], data.y[chosen], rng)
        else:
            own = data.y[data.train.indices]
            self.numbers = NumberRange(*map(float, (own.min(), own.mean(), own.max(), own.std())))


def describe(profile: DatasetProfile) -> str:
    """Return the figures of a data set in two sentences."""
    low, middle, high = profile.labels_per_device
    few, usual, many = profile.samples_per_device
    if profile.numbers is not None:
        own = profile.numbers
        return (
            f"{profile.devices} devices with {usual} samples each ({few} to {many}), and a number "
            f"to predict from {own.lowest:.4g} to {own.highest:.4g} (mean {own.mean:.4g}, standard "
            f"deviation {own.deviation:.3g}), in {profile.labels} intervals of which a device has "
            f"{middle} ({low} to {high}). A sample takes {profile.sample_bytes:,} bytes. Methods "
            "are judged by R2, the share of the variance that is predicted; points are of it."
        )
    return (
        f"{profile.devices} devices with {usual} samples each ({few} to {many}), {profile.labels} "
        f"labels of which a device has {middle} ({low} to {high}); label "
        f"'{profile.commonest[0]}' is {profile.commonest[1]:.0%} of all, '{profile.rarest[0]}' "
        f"{profile.rarest[1]:.1%}. A sample takes {profile.sample_bytes:,} bytes."
    )


def warnings(profile: DatasetProfile, capacity: int, *, shuffled: bool) -> Iterator[str]:
    """Yield what may spoil an advice on this data, or the use of it, a sentence each."""
    if capacity >= profile.samples_per_device[1]:
        yield (
            f"Half of the devices can keep all that they have here, in {capacity} slots: there is "
            "nothing to choose. Give more of the data, or advise again with a smaller store."
        )
    if not shuffled and profile.drift > profile.drift_by_chance + 0.1:
        yield (
            "The order of the rows matters: the labels of the first and the second half of a "
            f"device's rows are {profile.drift:.2f} apart ({profile.drift_by_chance:.2f} by "
            "chance). If that order is not time, advise again with --shuffled."
        )
    if not shuffled and profile.runs > profile.runs_by_chance + 0.1:
        yield (
            f"Labels come in runs: {profile.runs:.0%} of rows repeat the label before "
            f"({profile.runs_by_chance:.0%} by chance), so the newest samples are much alike."
        )
    named, score = ("Label", "accuracy") if profile.numbers is None else ("Interval", "R2")
    noise = profile.noise
    if noise.low > _NOISY:
        yield (
            f"About {noise.share:.0%} of the labels ({noise.low:.0%} to {noise.high:.0%}) are "
            "wrong, or their classes overlap (confident learning)."
        )
    if profile.rarest[1] < 0.02:
        yield (
            f"{named} '{profile.rarest[0]}' is rare ({profile.rarest[1]:.1%}): overall {score} "
            "hardly depends on it."
        )
    if profile.labels_per_device[1] < profile.labels:
        yield (
            f"Half of the devices have at most {profile.labels_per_device[1]} of the "
            f"{profile.labels} {named.lower()}s."
        )
    if profile.tested < 500:
        yield (
            f"Only {profile.tested} samples are for testing: a point of accuracy is "
            f"{profile.tested / 100:.1f} of them."
            if profile.numbers is None
            else f"Only {profile.tested} samples are for testing."
        )
    if profile.devices < 5:
        yield (
            f"{profile.devices} devices are few for federated learning: a larger fleet may differ."
        )


def _halves_apart(labels: list[IntArray], count: int) -> float:
    """Return the total variation between halves, averaged over devices by their sizes."""
    apart, weight = 0.0, 0
    for own in (own for own in labels if len(own) > 1):
        first, second = (
            np.bincount(half, minlength=count) / len(half)
            for half in np.split(own, [len(own) // 2])
        )
        apart += len(own) * float(np.abs(first - second).sum()) / 2
        weight += len(own)
    return apart / max(weight, 1)


def _repeats(labels: list[IntArray]) -> float:
    alike = sum(int((own[1:] == own[:-1]).sum()) for own in labels)
    return alike / max(sum(len(own) - 1 for own in labels), 1)
