"""What the agent says of itself: at its start, now and then, and at its end; on a terminal a line that lives."""

import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedkeep.agent.agent import Agent
    from fedkeep.agent.assembly import AssembledAgent

log = logging.getLogger(__name__)
_LINE_SECONDS = 60.0
"""Between two lines of the log about the same kind of thing."""
_FIRST_SECONDS = 2.0
"""The first refusals are told sooner: something is probably not as its owner thinks."""
_LIVE_SECONDS = 0.5
_UNREAD = ("refused.malformed", "refused.oversized", "refused.too-slow")
"""What never became an arrival."""


def introduce(assembly: "AssembledAgent") -> None:
    """What this agent is, how many samples fit, and what it waits for."""
    agent, layout = assembly.agent, assembly.layout
    config = agent.config
    model = config.model.get("path") or config.model.get("name", "softmax")
    shape = " x ".join(map(str, config.samples.shape))
    log.info(
        "policy %s (%s), model %s, samples of %s %s and %d labels; room for %d samples in %d bytes, %d each; %d stored",
        config.policy_name, config.preset, model, shape, config.samples.dtype, config.samples.labels,
        layout.capacity, layout.geometry.size, layout.geometry.cell_size, len(agent.store),
    )  # fmt: skip
    if agent.model_date.round < 0:
        lent = ", and slots of labels that have not come are lent to the others" * (config.device.quotas == "targets")
        valued = agent.device.model is not None and config.policy.uses_direction
        kept = "what is most like the mean of all that came" if valued else "a random draw"
        log.info("no server has called yet: until one does, %s of each label seen is kept%s", kept, lent)
    names = ", ".join(source.name for source in config.sources) or "nothing: there is no [[source]]"
    log.info("ready: reading %s; ask it by `fedkeep agent status --socket %s`", names, config.agent.socket)


class Voice:
    """Says what has changed, and no more often than anyone would want to read it."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._told = self._start = Counter(agent.counters)
        self._next, self._next_live = time.monotonic() + _FIRST_SECONDS, 0.0
        self._live = sys.stderr.isatty()

    def speak(self) -> None:
        """Called often; says something where there is something to say and it is time."""
        now = time.monotonic()
        if self._live and now >= self._next_live:
            self._next_live = now + _LIVE_SECONDS
            sys.stderr.write(f"\r\x1b[K{self._summary()}")
            sys.stderr.flush()
        if now < self._next:
            return
        if refused := _refusals(Counter(self._agent.counters) - self._told):
            log.warning("refused: %s; `fedkeep agent refused` shows the last of them", refused)
            self._next = now + _LINE_SECONDS
        self._told = Counter(self._agent.counters)
        notify(f"STATUS={self._summary()}")

    def conclude(self) -> None:
        """What came of it all."""
        if self._live:
            sys.stderr.write("\r\x1b[K")
        log.info("ended: %s", self._summary())

    def all_refused(self) -> str:
        """What was wrong with the records, where none of them was sound; nothing where one was, or none came."""
        counts = Counter(self._agent.counters) - self._start
        judged = counts["kept"] + counts["replaced"] + counts["refused.score"] + counts["refreshed"]
        return "" if judged else _refusals(counts)

    def _summary(self) -> str:
        counts = Counter(self._agent.counters) - self._start
        arrived = counts["seen"] + sum(counts[name] for name in _UNREAD)
        said = [f"{arrived} arrived", f"{counts['kept'] + counts['replaced']} kept"]
        if refused := _refusals(counts):
            said.append(f"refused {refused}")
        if skipped := counts["skipped.overload"]:
            said.append(f"{skipped} skipped")
        return ", ".join([*said, f"{len(self._agent.store)} of {self._agent.device.capacity} stored"])


def _refusals(counts: Counter[str]) -> str:
    """What was wrong with records, by reason; a sample that is merely worth less is not wrong."""
    wrong = sorted(name for name in counts if name.startswith("refused.") and name != "refused.score")
    return ", ".join(f"{counts[name]} {name.removeprefix('refused.')}" for name in wrong)


def notify(message: str) -> None:
    """Sends a line such as `READY=1` to systemd; a listener that is gone is no fault of the agent."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watch(alive: Callable[[], bool]) -> threading.Event:
    """Tells systemd, if it watches this process, that the agent is alive for as long as it is, or until the event."""
    ended, period = threading.Event(), os.environ.get("WATCHDOG_USEC", "")
    meant = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())

    def tell() -> None:
        while not ended.wait(int(period) / 2e6):
            if alive():
                notify("WATCHDOG=1")

    if period.isdecimal() and meant:
        threading.Thread(target=tell, name="watchdog", daemon=True).start()
    return ended
