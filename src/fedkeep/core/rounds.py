"""A round in words: how devices train in it, what it brought, who did not count, and how good the model is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.screening import robust_cap
from fedkeep.core.types import AnyArray, DeviceId, FloatArray, LocalTraining

_TRIM = 0.2
_WORST_LOSS = 100.0
"""No mean loss of a device counts for more than so many times the median of all."""


@dataclass(frozen=True)
class Schedule(LocalTraining):
    """Local training over the rounds: the learning rate falls by `decay` every `decay_every` rounds.

    >>> [round(Schedule(0.1, epochs=5, decay=0.5).local(round_).learning_rate, 3) for round_ in (0, 99, 100, 200)]
    [0.1, 0.1, 0.05, 0.025]
    """

    decay: float = 0.95
    """What the learning rate is multiplied by every `decay_every` rounds; 1 keeps it."""
    decay_every: int = 100
    """Rounds between two such steps."""

    def __post_init__(self) -> None:
        check_range(self, "learning_rate", above=0)
        check_range(self, "epochs", "decay_every", "batch_size", least=1)
        check_range(self, "decay", above=0, most=1)
        check_range(self, "proximal", least=0)

    def local(self, round_: int) -> LocalTraining:
        rate = self.learning_rate * self.decay ** (round_ // self.decay_every)
        return LocalTraining(rate, self.epochs, self.batch_size, self.proximal)


@dataclass(frozen=True)
class Rejection:
    """A report or profile that did not count, or not in full, and why."""

    device: DeviceId
    reason: str
    detail: str


def cuts(
    what: str, devices: Sequence[DeviceId], said: AnyArray, counted: AnyArray
) -> list[Rejection]:
    """Whose word counts for less than it says, by the name of what was cut."""
    cut = np.flatnonzero(counted < said).tolist()
    return [
        Rejection(devices[i], f"{what}-cut", f"a {what} of {said[i]:g} counts as {counted[i]:g}")
        for i in cut
    ]


def credible(
    said: FleetProfiles, before: FloatArray, growth: float
) -> tuple[FleetProfiles, FloatArray, list[Rejection]]:
    """The fleet as far as its devices' claims count, with their rates, and whose claims were cut.

    `before` are the rates that counted last, NaN where there are none: none counts for more than `growth` times that.
    """
    rates, devices = said.velocities.sum(axis=1, dtype=np.float64), said.devices.tolist()
    grown = np.where(before > 0, growth * before, np.inf)
    capped = np.minimum(np.minimum(rates, robust_cap(rates)), grown)
    scale = np.divide(capped, rates, out=np.ones_like(rates), where=rates > 0)
    capacities = np.minimum(said.capacities, robust_cap(said.capacities.astype(np.float64)))
    refusals = cuts("rate", devices, rates, capped) + cuts(
        "capacity", devices, said.capacities, capacities
    )
    return (
        FleetProfiles(said.devices, capacities.astype(np.int64), said.velocities * scale[:, None]),
        capped,
        refusals,
    )


@dataclass(frozen=True, eq=False)
class RoundSummary:
    """What a closed round brought."""

    round: int
    participants: tuple[DeviceId, ...]
    accepted: tuple[DeviceId, ...]
    empty: tuple[DeviceId, ...]
    """Devices that had nothing to train on: they took part all the same."""
    missing: tuple[DeviceId, ...]
    refusals: tuple[Rejection, ...]
    outvoted: tuple[DeviceId, ...] = ()
    """Devices whose updates a robust mean left out, for they keep going against where all others take the model."""


def merge_evaluations(
    told: Mapping[DeviceId, tuple[int, float, int]],
) -> tuple[dict[str, float], list[Rejection]]:
    """Loss and accuracy over all samples, the robust accuracy beside them, and whose counts or losses were cut.

    A device tells its samples, their losses added up, and how many were right.
    No device counts more samples than the fleet's own counts allow. The robust accuracy leaves out the fifth of the
    fleet that says the best and the fifth that says the worst, no device heavier than the upper quartile.
    """
    devices = [device for device, (samples, _, _) in told.items() if samples > 0]
    if not devices:
        return {}, []
    samples, losses, correct = (
        np.array([told[d][i] for d in devices], dtype=np.float64) for i in range(3)
    )
    counted = np.minimum(samples, robust_cap(samples))
    means = losses / samples
    worst = np.minimum(means, _WORST_LOSS * (np.median(means) or np.inf))
    merged = {
        "samples": float(counted.sum()),
        "loss": float(worst @ counted / counted.sum()),
        "accuracy": float((correct / samples) @ counted / counted.sum()),
        "accuracy_robust": _trimmed(
            correct / samples, np.minimum(samples, np.quantile(samples, 0.75))
        ),
    }
    return merged, cuts("count", devices, samples, counted) + cuts("loss", devices, means, worst)


def _trimmed(values: FloatArray, weights: FloatArray) -> float:
    """The weighted mean of the middle: without the lowest and the highest `_TRIM` of the weight."""
    order = np.argsort(values)
    ends = np.cumsum(weights[order]) / weights.sum()
    starts = np.concatenate([[0.0], ends[:-1]])
    kept = np.clip(np.minimum(ends, 1 - _TRIM) - np.maximum(starts, _TRIM), 0.0, None)
    return float((values[order] * kept).sum() / kept.sum())
