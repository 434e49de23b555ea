"""What sources hand to the agent, the queue in which it waits, and what of it is a sample."""

import logging
import math
import os
import reprlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fedkeep.agent.record import SampleForm
from fedkeep.agent.record_fields import Record, Scalar, known_fields, own_time
from fedkeep.agent.sample_ids import SampleIds, is_erased, recognised
from fedkeep.core.screening import screen_samples
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray, Batch, BoolArray, IntArray
from fedkeep.protocol.messages import RefusedRecord

log = logging.getLogger(__name__)

SOUND_REFUSALS = frozenset({"refused.score", "refused.room", "refused.rule"})
"""Fates of sound samples that are not kept: nothing was wrong with their records."""
Acknowledge = Callable[[str], None]
"""Called once with a sample's fate, after that fate is on the disk."""
Overload: TypeAlias = Literal["wait", "sample", "drop"]
"""What a source does when the queue is full."""


@dataclass(slots=True, eq=False)
class Arrival:
    """One sample as it came; nothing about it is believed yet.

    A source that can send a record again gives `acknowledge`, and lets go of the record only once
    that was called: then the sample is on the disk, or it is known why it is not kept.
    """

    x: Any
    """Anything a source read; in the queue, an array of the samples' form, or a file's bytes, or
    None if it is neither."""
    y: Any
    id: Any
    source: str
    acknowledge: Acknowledge | None = None
    draw: int = -1
    """The keyed hash by which the queue thins what may be skipped; -1 where it must not be."""
    time: float = math.nan
    """The record's own time, in seconds since 1970; NaN where it has none."""
    payload: bytes | None = None
    """Its file, where samples are files, once `x` was made of it."""
    wrong: str = "shape"
    """The reason for which it is refused where `x` is None."""
    fields: dict[str, Scalar] = field(default_factory=dict)
    """What else the record says of itself: numbers, texts and flags by name, few and short."""
    label_only: bool = False
    """Whether it is the label of a sample that came before, or will come."""

    def answer(self, fate: str) -> None:
        """Give the sender the sample's fate, if it wants to know.

        Its troubles are not the agent's.
        """
        try:
            if self.acknowledge is not None:
                self.acknowledge(fate)
        except Exception:
            log.exception("source '%s' could not be given a sample's fate", self.source)


_DRAWS, _LARGEST_STRIDE = 1 << 64, 1 << 20
_RECORDS, _BYTES = 64, 512
"""The refusals that are shown, and how much of each."""
_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxdict = 12
_short.maxstring = _short.maxother = _short.maxlong = _BYTES


class IngestQueue:
    """A bounded queue between sources and agent: when it is full, it waits, thins or drops.

    `sample` keeps an even sample, however labels and ids follow each other: each arrival draws a
    keyed hash of its place in the stream, and one of `stride` is let in. When the queue is full,
    `stride` doubles and those in the queue that the new rate excludes leave it. While the queue
    stays nearly empty, `stride` halves again.

    While the disk takes no writes, the queue is held: then nothing is skipped, and everybody waits.

    Parameters
    ----------
    limit
        The samples that may wait.
    form
        What every sample looks like.
    calm_seconds
        How long `stride` stays as it is before it is halved.
    key
        The key of the hashes; None: a random one, which no sender can know.
    """

    def __init__(
        self,
        limit: int,
        form: SampleForm,
        calm_seconds: float = 1.0,
        key: bytes | None = None,
    ) -> None:
        self.form, self._limit, self._calm = form, limit, calm_seconds
        self.stopped = self.held = False
        self.ends = False
        """Whether the agent ends with its sources: else a pipe waits for its next writer."""
        self.stride = 1
        self._key = os.urandom(16) if key is None else key
        self._queue: deque[Arrival] = deque()
        self._changed = threading.Condition()
        self._offered = 0
        self._last_change = -math.inf
        self._counts: Counter[str] = Counter()
        self.refused: deque[RefusedRecord] = deque(maxlen=_RECORDS)
        """The latest refusals, oldest first."""

    def __len__(self) -> int:
        return len(self._queue)

    def offer(
        self, arrival: Arrival, *, wait: bool, rule: Literal["sample", "drop"] = "sample"
    ) -> bool:
        """Hand a sample over.

        Parameters
        ----------
        arrival
            The sample; once it is in the queue, the agent answers it.
        wait
            Whether to hold the source back while the queue is full.
        rule
            Which arrivals are skipped otherwise: an even sample of the stream stays, or what comes
            while the queue is full is dropped.

        Returns
        -------
        bool
            Whether the sample got a place or a fate; False once the agent stops. Then it stays
            unanswered, and whoever can send it again does so to the agent that comes next.
        """
        self._shape(arrival)
        # A label is small, and one that is skipped would cost the sample that waits for it.
        wait = wait or arrival.label_only
        skipped: list[Arrival] = []
        with self._changed:
            if not wait and rule == "sample" and not self.held:
                arrival.draw = self._next_draw()
                if not self._is_chosen(arrival):
                    skipped = [arrival]
                elif len(self._queue) >= self._limit:
                    skipped = self._thin()
                    if not self._is_chosen(arrival) or len(self._queue) >= self._limit:
                        skipped.append(arrival)
            elif not wait and not self.held and len(self._queue) >= self._limit:
                skipped = [arrival]
            else:
                self._changed.wait_for(lambda: self.stopped or len(self._queue) < self._limit)
            if self.stopped:
                return False
            if not skipped or skipped[-1] is not arrival:
                self._queue.append(arrival)
                self._changed.notify_all()
            if skipped:
                self._counts[f"skipped.{rule}"] += len(skipped)
        for one in skipped:
            one.answer("skipped")
        return True

    def _shape(self, arrival: Arrival) -> None:
        """Bring a sample's numbers into the samples' form; None where they are none."""
        if arrival.label_only:
            return
        came, arrival.x = arrival.x, self.form.taken(arrival.x)
        most = self.form.payload_bytes
        if most is not None and arrival.x is not None and len(arrival.x) > most:
            arrival.x, arrival.wrong = None, "oversized"
        if arrival.x is None:
            self.refuse(arrival.wrong, arrival.source, came, count=0)

    def refuse(self, reason: str, source: str, raw: Any = b"", count: int = 1) -> None:
        """Count what could not even be read as a sample, and keep how it began.

        With a count of 0 it is only kept.
        """
        record = RefusedRecord(time.time(), source, reason, _shown(raw))
        with self._changed:
            self.refused.append(record)
            if count:
                self._counts[f"refused.{reason}"] += count

    def take(self, count: int, timeout: float, linger: float) -> list[Arrival]:
        """Return up to `count` samples: wait `timeout` for the first and `linger` for the rest."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.stopped, timeout)
            if 0 < len(self._queue) < count and linger:
                self._changed.wait_for(lambda: len(self._queue) >= count or self.stopped, linger)
            taken = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
            if self.stride > 1 and len(self._queue) <= self._limit // 16:
                self._relax()
            if taken:
                self._changed.notify_all()
            return taken

    def hold(self, *, held: bool) -> None:
        """Hold every source back, whatever its rule, or let them go on."""
        with self._changed:
            self.held = held

    def counted(self) -> Counter[str]:
        """Return what was skipped or refused since last asked."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
            return counts

    def wait_stopped(self, seconds: float | None = None) -> None:
        """Return once the agent stops, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped, seconds)

    def stop(self) -> None:
        """Let all sources go; what they offer from now on gets no answer."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def _next_draw(self) -> int:
        """Return a hash of the arrival's place in the stream; it takes the key to know it."""
        self._offered += 1
        place = self._offered.to_bytes(8, "little")
        return int.from_bytes(blake2b(place, digest_size=8, key=self._key).digest(), "little")

    def _is_chosen(self, arrival: Arrival) -> bool:
        """Whether the present rate lets an arrival in.

        Those of a higher rate are among those of a lower.
        """
        return arrival.draw < _DRAWS // self.stride

    def _thin(self) -> list[Arrival]:
        """Halve the rate, as of now and for what is in the queue; return those that leave it."""
        if self.stride >= _LARGEST_STRIDE:
            return []
        self.stride *= 2
        self._last_change = time.monotonic()
        log.warning("the stream is faster than this device: valuing one arrival of %d", self.stride)
        leaving = [one for one in self._queue if not self._is_chosen(one)]
        self._queue = deque(one for one in self._queue if self._is_chosen(one))
        return leaving

    def _relax(self) -> None:
        """Double the rate, unless it has just changed: what that did must show first."""
        now = time.monotonic()
        if now < self._last_change + self._calm:
            return
        self.stride, self._last_change = self.stride // 2, now
        if self.stride == 1:
            log.info("keeping up again: valuing every arrival")


def queue_limit(form: SampleForm) -> int:
    """Return how many samples wait by default: those of four megabytes, within 64 and 4,096."""
    return min(4096, max(64, (4 << 20) // form.arriving_bytes))


def _shown(raw: Any) -> str:
    """Return the beginning of anything at all, as text."""
    if isinstance(raw, bytes | bytearray | memoryview):
        return bytes(raw[:_BYTES]).decode(errors="backslashreplace")
    try:
        return _short.repr(raw)[:_BYTES]
    except Exception as error:  # noqa: BLE001 - whatever a hostile record does when it is looked at
        return f"{type(raw).__name__} that cannot be shown ({type(error).__name__})"


@dataclass
class Source:
    """A stream of samples, as a table `[[source]]` describes it.

    Every source follows one rule: a record leaves it only with its fate. It hands each record over
    by `deliver` with a function that acknowledges it, and until that is called the record stays
    where it came from, so that an agent that comes next gets it again. Streams without a way back,
    such as pipes, have nothing to acknowledge; they wait. `fedkeep.testing.check_source` checks a
    source of your own.
    """

    name: str
    """How messages, `why` and `erase --source` call it."""
    namespace: str | None = field(default=None, kw_only=True)
    """Ids are the same sample only within a namespace; None: the source's name. Sources that
    name one share it."""
    overload: Overload = field(default="wait", kw_only=True)
    """When the agent cannot keep up: `wait` holds the stream back, `sample` values an even
    sample of it, `drop` drops what comes meanwhile."""

    settles: ClassVar[bool] = False
    """Whether `run` has work of its own left once the last fates are on the disk, and is waited
    for."""

    def set_device(self, name: str) -> None:
        """Take a name for this device, the same after a restart.

        The agent gives it before `open`.
        """

    def open(self) -> None:
        """Fail at once if the stream cannot be had."""

    def run(self, intake: IngestQueue) -> None:
        """Read the stream, in a thread of its own, until it ends or the intake is stopped."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what `open` took."""

    def deliver(
        self,
        intake: IngestQueue,
        x: Any,
        y: Any,
        id: Any = None,  # noqa: A002 - the record's own word
        acknowledge: Acknowledge | None = None,
        *,
        time: Any = None,
        fields: Mapping[str, Scalar] | None = None,
    ) -> bool:
        """Hand a record over as the source's `overload` says.

        Parameters
        ----------
        intake
            The agent's queue, as `run` got it.
        x, y, id
            The record as it came; the agent refuses what is no sample, and says why. Without `y`
            the sample waits for its label; without `x` this is the label of another record.
        acknowledge
            Called once with the record's fate, in the agent's thread: only then may the record be
            deleted, acknowledged or forgotten. None: the stream has no way back.
        time
            The record's own time: ISO 8601 text, or seconds, milliseconds ... since 1970.
        fields
            What else it says of itself, by name; what is no scalar, or too much, is left out.

        Returns
        -------
        bool
            False once the agent stops: the record got no fate, and must stay.
        """
        arrival = Arrival(
            x, y, id, self.name, acknowledge, time=own_time(time), label_only=x is None
        )
        if fields:
            arrival.fields = known_fields(fields)
        rule: Literal["sample", "drop"] = "drop" if self.overload == "drop" else "sample"
        return intake.offer(arrival, wait=self.overload == "wait", rule=rule)

    def deliver_record(
        self, intake: IngestQueue, record: Record, acknowledge: Acknowledge | None = None
    ) -> bool:
        """Hand over a record as `FieldNames` took it apart."""
        return self.deliver(
            intake,
            record.x,
            record.y,
            record.id,
            acknowledge,
            time=record.time,
            fields=record.fields,
        )


class OutlierFilter:
    """How large samples usually are, by the largest number of each.

    What is far beyond would outweigh all others.

    The usual is a median of what came before, or at first of what came together, refused samples
    included, so that a stream whose scale really changes is believed after a while.
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
        if not self._outlier:  # no median, which loads a megabyte for masked arrays
            return np.asarray(largest > self._limit)
        known = self._seen if len(self._seen) >= self._LEAST else [*self._seen, *largest.tolist()]
        usual = float(np.median(known)) if len(known) >= self._LEAST else 0.0
        self._seen.extend(largest[-self._LATEST :].tolist())
        bound = min(self._limit, self._outlier * usual) if usual else self._limit
        return np.asarray(largest > bound)


def screen(
    arrivals: list[Arrival],
    form: SampleForm,
    labels: int,
    erased: Container[int],
    magnitudes: OutlierFilter,
    ids: SampleIds,
    stored: Mapping[int, Any],
    targets: NumberTargets | None = None,
    *,
    labelled: bool = True,
) -> tuple[Batch, list[Arrival], list[tuple[Arrival, str]]]:
    """Return the valid samples as a batch with their arrivals, and the others with a reason each.

    Parameters
    ----------
    arrivals
        What came, all from one source.
    form, labels
        What a sample looks like, and how many labels there are.
    erased
        The numbers of erased samples, which are refused.
    magnitudes
        The bound on the size of a sample's numbers.
    ids, stored
        How ids become numbers, and what is known of each stored sample by its number.
    targets
        What targets look like that are numbers to predict; None: they are labels.
    labelled
        Whether samples must have a label; else they are taken without one.
    """
    x = np.stack(
        [
            np.zeros(form.shape, form.dtype) if arrival.x is None else arrival.x
            for arrival in arrivals
        ]
    )
    y = np.array([_number(arrival.y) if labelled else 0.0 for arrival in arrivals])
    known = (y == np.floor(y)) & (y >= 0) & (y < labels)
    if targets is not None:
        given = [_several(arrival.y, targets.width) for arrival in arrivals]
        y = np.array(given) if labelled else np.zeros((len(arrivals), targets.width))
        known = targets.valid(y)
    # NaN, which is not even itself, is no id.
    named = [
        isinstance(arrival.id, str | bytes | int | float | None) and arrival.id == arrival.id
        for arrival in arrivals
    ]
    read = np.array([arrival.x is not None for arrival in arrivals]) & named
    sound = read & screen_samples(x, y, form.shape, labels, targets)[0]
    huge = np.zeros(len(arrivals), dtype=bool)
    if sound.any():
        huge[sound] = magnitudes.huge(x if sound.all() else x[sound])
    rows, numbers, refused = [], [], []
    for row, arrival in enumerate(arrivals):
        if arrival.x is None:
            reason = arrival.wrong
        elif not known[row]:
            reason = "label"
        elif not named[row]:
            reason = "id"
        elif not sound[row]:
            reason = "not-finite"
        elif huge[row]:
            reason = "huge"
        else:
            content = x[row].tobytes() if arrival.payload is None else arrival.payload
            number = recognised(ids, arrival.source, arrival.id, content, stored)
            if not is_erased(ids, number, arrival.id, content, erased):
                rows.append(row)
                numbers.append(number)
                continue
            reason = "erased"
        refused.append((arrival, reason))
    own = y[rows].astype(np.int64) if targets is None else targets.settled(y[rows])
    batch = Batch(x[rows], own, np.array(numbers, dtype=np.int64))
    return batch, [arrivals[row] for row in rows], refused


def _several(y: object, width: int) -> list[float]:
    """Return so many numbers, alone or in a list; NaN where they are none or not so many."""
    if isinstance(y, np.ndarray):
        y = y.tolist()
    rows = list(y) if isinstance(y, list | tuple) else [y]
    return [_number(one) for one in rows] if len(rows) == width else [math.nan] * width


def screen_labels(
    arrivals: list[Arrival],
    labels: int,
    erased: Container[int],
    ids: SampleIds,
    stored: Mapping[int, Any],
    targets: NumberTargets | None = None,
) -> tuple[IntArray, AnyArray, list[Arrival], list[tuple[Arrival, str]]]:
    """Return the ids and labels of records that hold a label alone, and those that are wrong.

    Parameters
    ----------
    arrivals
        What came, all from one source.
    labels
        How many labels there are.
    erased
        The numbers of erased samples, whose labels are refused.
    ids, stored
        How ids become numbers, and what is known of each stored sample by its number.
    targets
        What targets look like that are numbers to predict, one a sample; None: they are labels.
    """
    numbers, found, sound, refused = [], [], [], []
    for arrival in arrivals:
        label, given = _number(arrival.y), arrival.id
        if targets is not None:
            valid = targets.width == 1 and bool(targets.valid(np.array([label]))[0])
        else:
            valid = label.is_integer() and 0 <= label < labels
        if not valid:
            refused.append((arrival, "label"))
        elif not isinstance(given, str | bytes | int | float) or _is_nan(given):
            refused.append((arrival, "id"))
        else:
            number = recognised(ids, arrival.source, given, b"", stored)
            if is_erased(ids, number, given, b"", erased):
                refused.append((arrival, "erased"))
                continue
            numbers.append(number)
            found.append(label)
            sound.append(arrival)
    y = np.array(found, dtype=np.int64 if targets is None else np.float64)
    return np.array(numbers, dtype=np.int64), y, sound, refused


def _is_nan(given: object) -> bool:
    return isinstance(given, float) and math.isnan(given)


def _number(y: object) -> float:
    """NaN where it is none."""
    if not isinstance(y, int | float | np.number) or isinstance(y, bool):
        return math.nan
    try:
        return float(y)
    except (OverflowError, ValueError, TypeError):
        return math.nan
