"""A round in words: how devices train in it, what it brought, and who did not count."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.types import AnyArray, DeviceId, LocalTraining


@dataclass(frozen=True)
class Schedule:
    """Local training over the rounds: the learning rate falls by `decay` every `decay_every` rounds.

    >>> [round(Schedule(0.1, epochs=5, decay=0.5).local(round_).learning_rate, 3) for round_ in (0, 99, 100, 200)]
    [0.1, 0.1, 0.05, 0.025]
    """

    learning_rate: float
    """eta of Eq. 1 and 12: the step of local training in the first rounds."""
    epochs: int
    """m of Eq. 1: passes over what is stored when a device takes part."""
    batch_size: int | None = None
    """Samples a step; left out: all that is stored at once, as in Eq. 12."""
    proximal: float = 0.0
    """mu of FedProx: how hard a device is pulled back to the model it began with; 0 is FedAvg."""
    decay: float = 0.95
    """What the learning rate is multiplied by every `decay_every` rounds; 1 keeps it."""
    decay_every: int = 100
    """Rounds between two such steps."""

    def __post_init__(self) -> None:
        within(self, "learning_rate", above=0)
        within(self, "epochs", "decay_every", "batch_size", least=1)
        within(self, "decay", above=0, most=1)
        within(self, "proximal", least=0)

    def local(self, round_: int) -> LocalTraining:
        rate = self.learning_rate * self.decay ** (round_ // self.decay_every)
        return LocalTraining(rate, self.epochs, self.batch_size, self.proximal)


@dataclass(frozen=True)
class Refusal:
    """A report or profile that did not count, or not in full, and why."""

    device: DeviceId
    reason: str
    detail: str


def cuts(what: str, devices: Sequence[DeviceId], said: AnyArray, counted: AnyArray) -> list[Refusal]:
    """Whose word counts for less than it says, by the name of what was cut."""
    cut = np.flatnonzero(counted < said).tolist()
    return [Refusal(devices[i], f"{what}-cut", f"a {what} of {said[i]:g} counts as {counted[i]:g}") for i in cut]


@dataclass(frozen=True, eq=False)
class RoundSummary:
    """What a closed round brought."""

    round: int
    participants: tuple[DeviceId, ...]
    accepted: tuple[DeviceId, ...]
    empty: tuple[DeviceId, ...]
    """Devices that had nothing to train on: they took part all the same."""
    missing: tuple[DeviceId, ...]
    refusals: tuple[Refusal, ...]
    outvoted: tuple[DeviceId, ...] = ()
    """Devices whose updates a robust mean left out, for they keep going against where all others take the model."""
