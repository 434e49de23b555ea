"""When a round opens, when it closes, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedkeep.core.server import Refusal, RoundSummary
from fedkeep.flower.roster import Identity


@dataclass(frozen=True)
class RoundOptions:
    """`rounds`: whom a round asks, and what it waits for."""

    participation: float = 0.1
    """|C_t| / |C|: the share of the devices online whose reports a round waits for, at least one."""
    over_selection: float = 1.3
    """How many times as many devices are asked as reports are waited for."""
    deadline: float = 60.0
    """Seconds after which a round closes with what came in."""
    quorum: float = 0.5
    """The share of the reports waited for without which a round leaves the model as it was."""
    min_devices: int = 1
    """Devices to wait for before the first round."""
    evaluate_every: int = 0
    """Rounds between evaluations on the devices; 0: none."""
    identity: Identity = "key"
    """Devices are known by their keys; `claim` believes their numbers, for SuperNodes without key files."""
    deterministic: bool = False
    """Ask exactly the chosen devices and await them all: the same run again gives the same bits."""

    def __post_init__(self) -> None:
        if not 0 < self.participation <= 1:
            raise ValueError(f"participation must be above 0 and at most 1, got {self.participation}")
        if not self.over_selection >= 1:
            raise ValueError(f"over_selection must be 1 or more, got {self.over_selection}")
        if not self.deadline > 0:
            raise ValueError(f"deadline must be above 0 seconds, got {self.deadline}")
        if not 0 <= self.quorum <= 1:
            raise ValueError(f"quorum must be at least 0 and at most 1, got {self.quorum}")
        if self.min_devices < 1 or self.evaluate_every < 0:
            raise ValueError("min_devices must be 1 or more, evaluate_every 0 or more")

    def wanted(self, devices: int) -> int:
        """How many reports a round waits for."""
        return max(1, round(self.participation * devices))

    def asked(self, devices: int) -> int:
        """How many devices a round asks."""
        wanted = self.wanted(devices)
        return wanted if self.deterministic else min(devices, math.ceil(self.over_selection * wanted))

    def least(self, wanted: int) -> int:
        """How many reports a round needs."""
        return wanted if self.deterministic else math.ceil(self.quorum * wanted)

    @property
    def patience(self) -> float:
        """Seconds that a round waits for its reports."""
        return math.inf if self.deterministic else self.deadline


@dataclass(frozen=True, eq=False)
class RoundOutcome:
    """A round as it ended."""

    summary: RoundSummary
    quorate: bool
    """Whether enough reports came in for the round to count."""
    refusals: tuple[Refusal, ...]
    """All that did not count: reports, profiles and messages that could not be read."""
    seconds: float
    evaluation: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, int | float | list[int] | list[float]]:
        """The round in Flower's terms; `refused` and `outvoted` name the devices."""
        return {
            "accepted": len(self.summary.accepted),
            "empty": len(self.summary.empty),
            "missing": len(self.summary.missing),
            "refused": sorted({refusal.device for refusal in self.refusals}),
            "outvoted": list(self.summary.outvoted),
            "quorate": int(self.quorate),
            "seconds": self.seconds,
        }
