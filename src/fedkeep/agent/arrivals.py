"""What sources hand to the agent, the bounded queue in which it waits, and what of it is a sample."""

import logging
import math
import reprlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from fedkeep.agent.record import SampleForm
from fedkeep.core.screening import screen_samples
from fedkeep.core.types import AnyArray, Batch, BoolArray
from fedkeep.protocol.messages import RefusedRecord

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
        try:
            if self.acknowledge is not None:
                self.acknowledge(fate)
        except Exception:
            log.exception("source '%s' could not be told of a sample's fate", self.source)


_RECORDS, _BYTES = 64, 512
"""The refusals that are shown, and how much of each."""
_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxdict = 12
_short.maxstring = _short.maxother = _short.maxlong = _BYTES


def sample_id(given: Any, content: bytes) -> int:
    """The number by which the store knows a sample: its own whole number, or a hash of its name or its content."""
    if isinstance(given, str) and given.isdecimal() and len(given) <= len(str(1 << 63)):
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool):
        if 0 <= given < 1 << 63:
            return given
        given = hex(
            given
        )  # decimal digits of a hostile number take for ever, or are refused by Python
    text = content if given is None else repr(given).encode(errors="backslashreplace")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


class IngestQueue:
    """A queue of at most `limit` samples that thins the stream evenly when the agent cannot keep up.

    When it is half full only every second arrival is let in, then every fourth, and so on; when it has been nearly
    empty for a while the stride halves again. Arrivals in between are counted and acknowledged as skipped, so that
    what is valued stays an even sample of the stream.
    """

    def __init__(self, limit: int, form: SampleForm, calm_seconds: float = 1.0) -> None:
        self.form, self._limit, self._calm = form, limit, calm_seconds
        self.sample_bytes = form.dtype.itemsize * math.prod(form.shape)
        """Of a sample as it arrives; it bounds what sources read at once."""
        self.stopped = False
        self.stride = 1
        self._queue: deque[Arrival] = deque()
        self._changed = threading.Condition()
        self._offered = 0
        self._next_stride_change = 0.0
        self._counts: Counter[str] = Counter()
        self.refused: deque[RefusedRecord] = deque(maxlen=_RECORDS)
        """The latest refusals, oldest first."""

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, arrival: Arrival, *, wait: bool) -> None:
        """Hands a sample over; with `wait`, holds the source back while the queue is full."""
        came, arrival.x = arrival.x, self.form.shaped(arrival.x)
        if arrival.x is None:
            self.refuse("shape", arrival.source, came, count=0)
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self.stopped or len(self._queue) < self._limit)
            if self.stopped:
                return  # unanswered: who waits for an answer sends it again to the agent that comes next
            if not wait:
                self._offered += 1
                if len(self._queue) >= self._limit // 2:
                    self._change_stride(self.stride * 2)
            if wait or (self._offered % self.stride == 0 and len(self._queue) < self._limit):
                self._queue.append(arrival)
                self._changed.notify_all()
                return
            self._counts["skipped.overload"] += 1
        arrival.answer("skipped")

    def refuse(self, reason: str, source: str, raw: Any = b"", count: int = 1) -> None:
        """Counts what could not even be read as a sample, and keeps how it began for people to see; 0: only that."""
        record = RefusedRecord(time.time(), source, reason, _shown(raw))
        with self._changed:
            self.refused.append(record)
            if count:
                self._counts[f"refused.{reason}"] += count

    def take(self, count: int, timeout: float, linger: float) -> list[Arrival]:
        """Up to `count` samples: waits `timeout` for the first and `linger` for the rest."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.stopped, timeout)
            if 0 < len(self._queue) < count and linger:
                self._changed.wait_for(lambda: len(self._queue) >= count or self.stopped, linger)
            taken = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
            if self.stride > 1 and len(self._queue) <= self._limit // 16:
                self._change_stride(self.stride // 2)
            if taken:
                self._changed.notify_all()
            return taken

    def counted(self) -> Counter[str]:
        """What was skipped or refused since last asked."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
            return counts

    def wait_stopped(self, seconds: float | None = None) -> None:
        """Returns once the agent stops, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped, seconds)

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def _change_stride(self, stride: int) -> None:
        """Unless it has just changed: what that did must show first."""
        now = time.monotonic()
        if now < self._next_stride_change:
            return
        self.stride, self._next_stride_change = stride, now + self._calm
        if stride > 1:
            log.warning("the stream is faster than this device: valuing one arrival of %d", stride)
        else:
            log.info("keeping up again: valuing every arrival")


def _shown(raw: Any) -> str:
    """The beginning of anything at all, as text."""
    if isinstance(raw, bytes | bytearray | memoryview):
        return bytes(raw[:_BYTES]).decode(errors="backslashreplace")
    try:
        return _short.repr(raw)[:_BYTES]
    except Exception as error:  # noqa: BLE001 - whatever a hostile record does when it is looked at
        return f"{type(raw).__name__} that cannot be shown ({type(error).__name__})"


@dataclass
class Source:
    """A stream of samples, as a table `[[source]]` describes it."""

    name: str
    """How messages, `why` and `erase --source` call it."""

    def open(self) -> None:
        """Fails at once if the stream cannot be had."""

    def run(self, intake: IngestQueue) -> None:
        """Reads the stream, in a thread of its own, until it ends or the intake is stopped."""
        raise NotImplementedError

    def close(self) -> None: ...


class OutlierFilter:
    """How large samples usually are, by the largest number of each: what is far beyond would outweigh all others.

    The usual is a median of what came before, or at first of what came together, refused samples included, so that a
    stream whose scale really changes is believed after a while.
    """

    _LATEST, _LEAST = 64, 16

    def __init__(self, limit: float, outlier: float) -> None:
        self._limit, self._outlier = limit, outlier
        self._seen: deque[float] = deque(maxlen=self._LATEST)

    def huge(self, x: AnyArray) -> BoolArray:
        """Which samples are too large, of finite ones."""
        flat = x.reshape(len(x), -1)
        largest = np.maximum(
            flat.max(axis=1).astype(np.float64), -flat.min(axis=1).astype(np.float64)
        )
        known = self._seen if len(self._seen) >= self._LEAST else [*self._seen, *largest.tolist()]
        usual = float(np.median(known)) if len(known) >= self._LEAST else 0.0
        self._seen.extend(largest[-self._LATEST :].tolist())
        bound = min(self._limit, self._outlier * usual) if usual and self._outlier else self._limit
        return np.asarray(largest > bound)


def screen(
    arrivals: list[Arrival],
    form: SampleForm,
    labels: int,
    erased: Container[int],
    magnitudes: OutlierFilter,
) -> tuple[Batch, list[Arrival], list[tuple[Arrival, str]]]:
    """The sound samples as a batch with their arrivals, and the others with the reason of each."""
    x = np.stack(
        [
            np.zeros(form.shape, form.dtype) if arrival.x is None else arrival.x
            for arrival in arrivals
        ]
    )
    y = np.array([_number(arrival.y) for arrival in arrivals])
    named = [isinstance(arrival.id, str | int | float | None) for arrival in arrivals]
    read = np.array([arrival.x is not None for arrival in arrivals]) & named
    sound = read & screen_samples(x, y, form.shape, labels)[0]
    huge = np.zeros(len(arrivals), dtype=bool)
    if sound.any():
        huge[sound] = magnitudes.huge(x if sound.all() else x[sound])
    rows, ids, refused = [], [], []
    for row, arrival in enumerate(arrivals):
        if arrival.x is None:
            reason = "shape"
        elif not (y[row].is_integer() and 0 <= y[row] < labels):
            reason = "label"
        elif not named[row]:
            reason = "id"
        elif not sound[row]:
            reason = "not-finite"
        elif huge[row]:
            reason = "huge"
        elif (id_ := sample_id(arrival.id, x[row].tobytes())) in erased:
            reason = "erased"
        else:
            rows.append(row)
            ids.append(id_)
            continue
        refused.append((arrival, reason))
    batch = Batch(x[rows], y[rows].astype(np.int64), np.array(ids, dtype=np.int64))
    return batch, [arrivals[row] for row in rows], refused


def _number(y: object) -> float:
    """NaN where it is none."""
    if not isinstance(y, int | float | np.number) or isinstance(y, bool):
        return math.nan
    try:
        return float(y)
    except (OverflowError, ValueError, TypeError):
        return math.nan
