"""Sending and collecting on Flower's Grid without its fixed three-second sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid


@dataclass(frozen=True)
class Asked:
    """A message in flight: to which node, in which round, of what kind."""

    node: int
    round: int
    kind: str


class Exchange:
    """Messages in flight; who answered what is known from what was sent, never from what the answer says."""

    def __init__(self, grid: Grid, poll_seconds: float = 0.25) -> None:
        self._grid, self._poll = grid, poll_seconds
        self._asked: dict[str, Asked] = {}

    def send(self, messages: Iterable[Message], round_: int) -> None:
        """Pushes the messages; those that Flower does not take count as never sent."""
        outgoing = list(messages)
        for message, message_id in zip(outgoing, self._grid.push_messages(outgoing), strict=False):
            if message_id:
                about = message.metadata
                self._asked[message_id] = Asked(about.dst_node_id, round_, about.message_type)

    def collect(self, seconds: float, enough: Callable[[], bool]) -> Iterator[tuple[Asked, Message]]:
        """Replies as they come, each once, until there are enough of them or the time is over."""
        end = time.monotonic() + seconds
        while not enough():
            yield from self.arrived()
            if enough() or time.monotonic() >= end:
                return
            time.sleep(min(self._poll, max(end - time.monotonic(), 0.0)))

    def arrived(self) -> Iterator[tuple[Asked, Message]]:
        """Replies that are there now."""
        if not self._asked:
            return
        for reply in self._grid.pull_messages(list(self._asked)):
            asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
            if asked is not None:
                yield asked, reply

    @property
    def pending(self) -> int:
        """How many messages are unanswered."""
        return len(self._asked)

    def waiting(self, round_: int, kind: str) -> int:
        """How many messages of a round and kind are unanswered."""
        return sum(asked.round == round_ and asked.kind == kind for asked in self._asked.values())

    def abandon(self, before: int) -> None:
        """Stops waiting for replies to rounds before `before`."""
        self._asked = {key: asked for key, asked in self._asked.items() if asked.round >= before}
