"""Replies that never come: what they cost in accuracy, and that no round stalls."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import Message

from fedkeep.flower.rounds import RoundOptions
from tests.flower.in_process import InProcessGrid
from tests.flower.small_fleet import SmallFleet

DEADLINE = 0.1
OPTIONS = RoundOptions(participation=0.5, deadline=DEADLINE, quorum=0.1)


class DroppingGrid(InProcessGrid):
    """Loses a share of the reports, by chance."""

    def __init__(self, grid: InProcessGrid, share: float, seed: int) -> None:
        super().__init__(grid.nodes.values())
        self._share, self._rng = share, np.random.default_rng(seed)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        return [
            r
            for r in replies
            if r.metadata.message_type != "train" or self._rng.random() >= self._share
        ]


@dataclass(frozen=True)
class Dropped:
    accuracy: float
    rounds: int
    longest: float
    """Seconds of the longest round."""


def try_dropout(share: float, seed: int, rounds: int = 10) -> Dropped:
    """A run of ten devices that loses this share of its reports."""
    fleet = SmallFleet(devices=10, rounds=rounds, seed=seed, options=OPTIONS)
    strategy = fleet.strategy()
    outcomes = list(strategy.rounds(DroppingGrid(fleet.grid(), share, seed), rounds))
    return Dropped(
        fleet.accuracy(strategy), len(outcomes), max(outcome.seconds for outcome in outcomes)
    )
