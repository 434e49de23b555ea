"""Replies that come again count once; `test_strategy.py` has the old report to a new order."""

from collections.abc import Iterable

import numpy as np
from flwr.app import Message

from fedkeep.flower.rounds import RoundOptions
from tests.flower.in_process import InProcessGrid
from tests.flower.small_fleet import SmallFleet

OPTIONS = RoundOptions(participation=1.0, deadline=2.0)


class RepeatingGrid(InProcessGrid):
    """Delivers every reply twice at once, and all that was ever said again with the next ones."""

    def __init__(self, grid: InProcessGrid) -> None:
        super().__init__(grid.nodes.values())
        self.captured: list[Message] = []

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        fresh = super().pull_messages(message_ids)
        self.captured += fresh
        return [*fresh, *self.captured]


def test_a_reply_delivered_again_and_again_counts_once() -> None:
    models = []
    for repeated in (False, True):
        fleet = SmallFleet(devices=3, options=OPTIONS)
        strategy, grid = fleet.strategy(), fleet.grid()
        outcomes = list(strategy.rounds(RepeatingGrid(grid) if repeated else grid, 4))
        assert [len(outcome.summary.accepted) for outcome in outcomes] == [3] * 4
        models.append(strategy.server.model)
    assert np.array_equal(*models)
