"""Collecting replies: by the deadline, whoever hangs."""

import threading
import time
from collections.abc import Iterable

import pytest
from flwr.app import Context, Message, RecordDict

from fedkeep.flower.exchange import Exchange
from tests.flower.in_process import InProcessGrid, make_node


def echo(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


class HalfUploaded(InProcessGrid):
    """Pulling one node's reply hangs, as on Flower's grid when the node died while it uploaded."""

    def __init__(self, nodes: int) -> None:
        super().__init__(make_node(number, echo, {}) for number in range(nodes))
        self.stuck = ""
        self.given_up = threading.Event()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = list(message_ids)
        if self.stuck in asked:
            self.given_up.wait(30)
        return super().pull_messages(asked)


def asking(grid: InProcessGrid, exchange: Exchange) -> None:
    exchange.send([Message(RecordDict(), node, "query") for node in grid.nodes], 3)


def test_a_reply_that_hangs_holds_up_neither_the_others_nor_the_deadline() -> None:
    grid = HalfUploaded(4)
    exchange = Exchange(grid)
    asking(grid, exchange)
    grid.stuck = "message-1"
    began = time.monotonic()
    replies = [asked.node for asked, _ in exchange.collect(3.0, lambda: not exchange.asked)]
    assert time.monotonic() - began < 10
    assert sorted(replies) == [1000, 1002, 1003]
    assert exchange.waiting(3, "query") == 1
    grid.given_up.set()
    late = [asked.node for asked, _ in exchange.collect(10.0, lambda: not exchange.asked)]
    assert late == [1001]


def test_every_reply_of_a_large_fleet_comes_once() -> None:
    grid = InProcessGrid(make_node(number, echo, {}) for number in range(50))
    exchange = Exchange(grid)
    asking(grid, exchange)
    replies = [asked.node for asked, _ in exchange.collect(10.0, lambda: not exchange.asked)]
    assert sorted(replies) == [1000 + number for number in range(50)]
    assert not list(exchange.arrived())


def test_what_goes_wrong_in_a_pull_is_told() -> None:
    class Broken(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            raise ConnectionError(f"no SuperLink for {len(list(message_ids))} messages")

    grid = Broken([make_node(0, echo, {})])
    exchange = Exchange(grid)
    asking(grid, exchange)
    with pytest.raises(ConnectionError, match="no SuperLink"):
        list(exchange.arrived())
