"""Sending and collecting on Flower's Grid without its fixed three-second sleep."""

import ctypes
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedkeep.core.types import IntArray

log = logging.getLogger("fedkeep.flower")

_PULLS_AT_ONCE = 8
_POLL_SECONDS = 0.25
_PULL_SECONDS = 2.0
"""After which a pull is left to itself."""
_WAITING_SECONDS = 60.0
"""Between two lines about nodes that have not replied."""
_QUIET_SECONDS, _QUIET_RATIO = 300.0, 10.0
"""Once everyone has replied in time, no exchange is waited for longer than this, or than so many
times the slowest: Flower loses replies that one of its mods made of a reply."""


_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 20
"""mallopt's M_MMAP_THRESHOLD, and from which size on memory goes back as soon as it is free."""


def give_back_large_arrays() -> None:
    """Have the C library return the memory of large arrays to the system once they are freed.

    Replies are read in several threads. By itself glibc keeps their memory for each thread, so that
    every round adds what the last one left unused: 50 replies of a million parameters cost 200 MB.
    Whoever sets MALLOC_MMAP_THRESHOLD_ decides; other C libraries stay as they are.
    """
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            set_option(_MMAP_THRESHOLD, _LARGE_BYTES)


class PendingRequest(NamedTuple):
    """A message in flight: to which node, in which round, of what kind."""

    node: int
    round: int
    kind: str


def size_of(message: Message) -> int:
    """Return the bytes of a message's arrays and of its head; an error has none."""
    if message.has_error():
        return 0
    arrays = sum(
        len(array.data)
        for record in message.content.array_records.values()
        for array in record.values()
    )
    values = (
        value for record in message.content.config_records.values() for value in record.values()
    )
    return arrays + sum(len(value) for value in values if isinstance(value, bytes))


@dataclass(eq=False)
class Exchange:
    """Messages in flight; a reply is attributed by what was sent, not by what it says.

    When a device dies while it uploads its reply, Flower waits minutes for the rest, and whoever
    pulls waits with it. So replies are pulled in a few threads: one that hangs holds up its own
    part of them, and no deadline. `meanwhile` is called between two looks for replies.
    """

    grid: Grid
    tally: IntArray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    """Bytes of content sent to devices and received from them."""
    meanwhile: Callable[[], None] = lambda: None
    asked: dict[str, PendingRequest] = field(default_factory=dict, init=False)
    """What is not answered yet, by the messages' ids."""
    _pulls: dict[Future[list[Message]], Sequence[str]] = field(default_factory=dict, init=False)
    """Those under way, and the messages whose replies they look for."""

    def send(self, messages: Iterable[Message], round_: int) -> None:
        """Push the messages; those that Flower does not take count as never sent."""
        outgoing = list(messages)
        # Flower gives None for a message that it did not take, and no ids at all where the
        # SuperLink was not there.
        for message, message_id in zip(outgoing, self.grid.push_messages(outgoing), strict=False):
            if message_id:
                self.tally[0] += size_of(message)
                self.asked[message_id] = PendingRequest(
                    message.metadata.dst_node_id, round_, message.metadata.message_type
                )

    def collect(
        self, seconds: float, enough: Callable[[], bool]
    ) -> Iterator[tuple[PendingRequest, Message]]:
        """Yield replies as they come, each once, until there are enough or the time is over."""
        end = time.monotonic() + seconds
        while not enough():
            yield from self.arrived()
            if enough() or time.monotonic() >= end:
                return
            self.meanwhile()
            time.sleep(min(_POLL_SECONDS, max(end - time.monotonic(), 0.0)))

    def arrived(self) -> Iterator[tuple[PendingRequest, Message]]:
        """Yield the replies that are there now."""
        hanging = {message_id for ids in self._pulls.values() for message_id in ids}
        ids = [message_id for message_id in self.asked if message_id not in hanging]
        parts = [ids[i::_PULLS_AT_ONCE] for i in range(min(_PULLS_AT_ONCE, len(ids)))]
        fresh = {_pull(self.grid, part): part for part in parts}
        wait(fresh, _PULL_SECONDS)
        self._pulls |= fresh
        for pull in [pull for pull in self._pulls if pull.done()]:
            del self._pulls[pull]
            for reply in pull.result():
                asked = self.asked.pop(reply.metadata.reply_to_message_id, None)
                if asked is not None:
                    self.tally[1] += size_of(reply)
                    yield asked, reply

    def waiting(self, round_: int, kind: str) -> int:
        """Return how many messages of a round and kind are unanswered."""
        return sum(asked.round == round_ and asked.kind == kind for asked in self.asked.values())


class PromptGrid:
    """A grid whose `send_and_receive` returns as soon as the last reply is there.

    Parameters
    ----------
    grid : Grid
        Flower's.
    tally : IntArray, optional
        Bytes sent and received are added to it.
    deadline : float, optional
        Seconds after which it returns with what came, if the caller would wait longer.
    """

    def __init__(
        self, grid: Grid, tally: IntArray | None = None, deadline: float | None = None
    ) -> None:
        self._grid, self._deadline = grid, math.inf if deadline is None else deadline
        self._tally = np.zeros(2, dtype=np.int64) if tally is None else tally
        self._longest: float | None = None
        """Seconds that the slowest exchange took to which everyone replied."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages, and return the replies that came in time."""
        began = next_words = time.monotonic()

        def report_waiting() -> None:
            """Log whom the round waits for, every minute."""
            nonlocal next_words
            if time.monotonic() - next_words >= _WAITING_SECONDS:
                next_words = time.monotonic()
                nodes = sorted(asked.node for asked in exchange.asked.values())
                words = (next_words - began, len(nodes), nodes[:5])
                log.warning("after %.0f s no reply has come from %d nodes, such as %s", *words)

        exchange = Exchange(self._grid, tally=self._tally, meanwhile=report_waiting)
        exchange.send(messages, 0)
        patience = min(self._deadline, math.inf if timeout is None else timeout)
        if self._longest is not None:
            patience = min(patience, max(_QUIET_SECONDS, _QUIET_RATIO * self._longest))
        replies = [reply for _, reply in exchange.collect(patience, lambda: not exchange.asked)]
        if exchange.asked:
            lost = sorted(asked.node for asked in exchange.asked.values())
            words = (len(lost), time.monotonic() - began, lost[:5])
            log.error("no reply from %d nodes within %.0f s, such as %s: given up", *words)
        else:
            self._longest = max(self._longest or 0.0, time.monotonic() - began)
        return replies


def _pull(grid: Grid, message_ids: Sequence[str]) -> Future[list[Message]]:
    """One request for replies, in a daemon thread: a hanging one must not hold up the exit."""
    pulled: Future[list[Message]] = Future()

    def run() -> None:
        try:
            pulled.set_result(list(grid.pull_messages(message_ids)))
        except Exception as error:  # noqa: BLE001 - passed on to whoever waits
            pulled.set_exception(error)

    Thread(target=run, daemon=True).start()
    return pulled
