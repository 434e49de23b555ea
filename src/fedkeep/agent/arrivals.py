"""What sources hand to the agent, and the bounded queue in which it waits."""

import logging
import reprlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from fedkeep.agent.record import SampleForm
from fedkeep.link.messages import RefusedRecord

log = logging.getLogger(__name__)

Acknowledge = Callable[[str], None]
"""Called once with a sample's fate, after that fate is on the disk."""


@dataclass(slots=True)
class Arrival:
    """One sample as it came; nothing about it is believed yet."""

    x: Any
    """Anything a source read; in the queue, an array of the samples' form, or None if it is none."""
    y: Any
    id: Any
    source: str
    acknowledge: Acknowledge | None = None

    def answer(self, fate: str) -> None:
        """Tells the sender, if it wants to know; its troubles are not the agent's."""
        if self.acknowledge is None:
            return
        try:
            self.acknowledge(fate)
        except Exception:
            log.exception("source '%s' could not be told of a sample's fate", self.source)


class Sink(Protocol):
    """Where sources put what arrives."""

    def offer(self, arrival: Arrival, *, wait: bool) -> None:
        """Hands a sample over; with `wait`, holds the source back while the queue is full."""

    def refuse(self, reason: str, source: str, raw: Any = b"", count: int = 1) -> None:
        """Counts what could not even be read as a sample, and keeps how it began for people to see."""

    @property
    def stopped(self) -> bool: ...


class Source(Protocol):
    """A stream of samples; `open` fails at once if it cannot be had, `run` reads it in a thread of its own."""

    name: str

    def open(self) -> None: ...

    def run(self, sink: Sink) -> None: ...

    def close(self) -> None: ...


_DIGITS = 19
"""Of the largest id that is a number."""


def sample_id(given: Any, content: bytes) -> int:
    """The number by which the store knows a sample: its own whole number, or a hash of its name or its content."""
    if isinstance(given, str) and given.isdecimal() and len(given) <= _DIGITS:
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool):
        if 0 <= given < 1 << 63:
            return given
        given = hex(given)  # decimal digits of a hostile number take for ever, or are refused by Python
    text = content if given is None else repr(given).encode(errors="backslashreplace")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


class Intake:
    """A queue of at most `limit` samples that thins the stream evenly when the agent cannot keep up.

    When it is half full only every second arrival is let in, then every fourth, and so on; when it has been nearly
    empty for a while the stride halves again. Arrivals in between are counted and acknowledged as skipped, so that
    what is valued stays an even sample of the stream.
    """

    def __init__(self, limit: int, form: SampleForm, calm_seconds: float = 1.0) -> None:
        self._limit, self._form, self._calm = limit, form, calm_seconds
        self._queue: deque[Arrival] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._offered = 0
        self._next_stride_change = 0.0
        self.stride = 1
        self._counts: Counter[str] = Counter()
        self.quarantine = Quarantine()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, arrival: Arrival, *, wait: bool) -> None:
        came, arrival.x = arrival.x, self._form.shaped(arrival.x)
        if arrival.x is None:
            self.quarantine.add(arrival.source, "shape", came)
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._stopped or len(self._queue) < self._limit)
            if self._stopped:
                return  # unanswered: who waits for an answer sends it again to the agent that comes next
            taken = wait or self._let_in()
            if taken:
                self._queue.append(arrival)
                self._changed.notify_all()
            else:
                self._counts["skipped.overload"] += 1
        if not taken:
            arrival.answer("skipped")

    def refuse(self, reason: str, source: str, raw: Any = b"", count: int = 1) -> None:
        self.quarantine.add(source, reason, raw)
        with self._changed:
            self._counts[f"refused.{reason}"] += count

    def take(self, count: int, timeout: float, linger: float) -> list[Arrival]:
        """Up to `count` samples: waits `timeout` for the first and `linger` for the rest."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._queue or self._stopped, timeout):
                self._relax()
                return []
            if len(self._queue) < count and linger:
                self._changed.wait_for(lambda: len(self._queue) >= count or self._stopped, linger)
            taken = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
            self._relax()
            self._changed.notify_all()
            return taken

    def counted(self) -> Counter[str]:
        """What was skipped or refused since last asked."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
            return counts

    def wait_stopped(self, seconds: float) -> None:
        """Returns once the agent stops, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _let_in(self) -> bool:
        self._offered += 1
        if len(self._queue) >= self._limit // 2 and time.monotonic() >= self._next_stride_change:
            self._change_stride(self.stride * 2)
        return self._offered % self.stride == 0 and len(self._queue) < self._limit

    def _relax(self) -> None:
        calm = self.stride > 1 and len(self._queue) <= self._limit // 16
        if calm and time.monotonic() >= self._next_stride_change:
            self._change_stride(self.stride // 2)

    def _change_stride(self, stride: int) -> None:
        self.stride = stride
        self._next_stride_change = time.monotonic() + self._calm
        if stride > 1:
            log.warning("the stream is faster than this device: valuing one arrival of %d", stride)
        else:
            log.info("keeping up again: valuing every arrival")


_RECORDS = 64
_BYTES = 512


class Quarantine:
    """Holds the latest refusals."""

    def __init__(self) -> None:
        self._records: deque[RefusedRecord] = deque(maxlen=_RECORDS)
        self._lock = threading.Lock()

    def add(self, source: str, reason: str, raw: Any) -> None:
        with self._lock:
            self._records.append(RefusedRecord(time.time(), source, reason, shown(raw)))

    def records(self) -> list[RefusedRecord]:
        """The refusals, oldest first."""
        with self._lock:
            return list(self._records)

    def clear(self) -> None:
        with self._lock:
            self._records.clear()


_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxdict = 12
_short.maxstring = _short.maxother = _short.maxlong = _BYTES


def shown(raw: Any) -> str:
    """The beginning of anything at all, as text."""
    if isinstance(raw, bytes | bytearray | memoryview):
        return bytes(raw[:_BYTES]).decode(errors="backslashreplace")
    try:
        return _short.repr(raw)[:_BYTES]
    except Exception as error:  # noqa: BLE001 - whatever a hostile record does when it is looked at
        return f"{type(raw).__name__} that cannot be shown ({type(error).__name__})"
