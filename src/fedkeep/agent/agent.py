"""The agent: one device, its durable store, and the loop that values, keeps and commits."""

import logging
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from fedkeep.agent.arrivals import Arrival, IngestQueue, OutlierFilter, screen
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.label_names import LabelNames
from fedkeep.agent.record import DAY, CounterBook, ModelVersion, Tombstones, Verdict
from fedkeep.agent.store_file import discard_copies
from fedkeep.core.device import Device
from fedkeep.core.errors import RejectedError
from fedkeep.core.participation import Participation
from fedkeep.core.protocols import Stateful
from fedkeep.core.state import snapshot_parts, strip_prefix
from fedkeep.core.types import Batch, Profile, Report, State, TrainOrder
from fedkeep.privacy.release import ReleasePipeline
from fedkeep.protocol.messages import ProfileRequest

if TYPE_CHECKING:
    from fedkeep.agent.assembly import AgentConfig

log = logging.getLogger(__name__)
_HOUSEKEEPING_SECONDS = 60.0
_STATISTICS_SECONDS = 60.0
"""How old the statistics on the disk may be while the agent runs: what a crash may cost of them, never a sample."""
_UNANSWERED = 10
"""Samples whose sender awaits no answer may wait this many times longer for a commit."""
_BATCH, _QUEUE = 64, 512
"""Samples that are valued together, and that may wait to be; beyond half of it the stream is thinned evenly."""
_LINGER_SECONDS, _PAUSE_SECONDS = 0.01, 0.05
"""How long a batch waits to fill, and a step while training pauses it."""
_SILENCE_SECONDS = 10.0
_ALONE_ARRIVALS = 256
"""After so many, and whenever they have doubled, a device that no server has called values against their own mean."""
_FATES = ("refused.score", "kept", "replaced", "refreshed")
"""How each `OfferResult` is counted and told."""


class Agent:
    """Owns device, store and model; all changes go through it, one at a time, and reach the disk together."""

    def __init__(
        self, device: Device, store: DurableStore, reserve: int, config: "AgentConfig"
    ) -> None:
        self.device, self.store, self.config = device, store, config
        self.store_path = config.store.file
        self.lock = threading.RLock()
        self.intake = IngestQueue(_QUEUE, config.form)
        self.counters, self.tombstones, self.model_date = (
            CounterBook(),
            Tombstones(),
            ModelVersion(),
        )
        self.door = ReleasePipeline()
        """All that leaves the device leaves through it."""
        self.seconds_per_sample = 0.0
        self._labels = LabelNames(config.samples.names)
        self._magnitudes = OutlierFilter(config.samples.limit, config.samples.outlier)
        self._batch, self._reserve = min(_BATCH, max(1, reserve // 2)), reserve
        self._parts: dict[str, Stateful] = {
            "device": device,
            "log": store.log,
            "clock": store.clock,
            "counters": self.counters,
            "tombstones": self.tombstones,
            "model": self.model_date,
        }
        self._judged = 0
        """Samples whose fate is not on the disk yet."""
        self._awaited: list[tuple[Arrival, str]] = []
        """Those among them whose senders await an answer."""
        self._alone_from = _ALONE_ARRIVALS
        self._training = threading.Lock()
        self._last_step = self._last_commit = self._last_whole = self._last_housekeeping = (
            time.monotonic()
        )

    def alive(self) -> bool:
        """Whether the stream is still valued: a watchdog asks. Training may hold it up, and counts as life."""
        return self._training.locked() or time.monotonic() - self._last_step < _SILENCE_SECONDS

    def restore(self, state: State, *, damaged: bool = False) -> None:
        """Becomes what a file says; what is missing of the state begins anew, the samples stay."""
        found = strip_prefix("device", state)
        notes = self.store.records.values()
        repaired = self.device.repair(
            found,
            held=[note.region for note in notes],
            next_arrival=1 + max((note.arrival for note in notes), default=-1),
        )
        if damaged and repaired.lost:
            log.warning("lost from the device's state: %s", ", ".join(repaired.lost))
        for note in repaired.notes:
            log.warning("%s", note)
        self.device.restore(repaired.state)
        for name, part in (self._parts | self.door.kept(under_way=False)).items():
            if part is not self.device and (own := strip_prefix(name, state)):
                part.restore(own)
        self.store.model_version = self.model_date.round
        self._alone_from = max(
            _ALONE_ARRIVALS,
            0 if self.device.global_gradient is None else 2 * self.device.window.count,
        )
        if "counters" in found:
            caught_up = self.store.write_down_since(int(found["counters"][0]))
            self.counters.update(seen=caught_up, kept=caught_up)

    def step(self, timeout: float) -> int:
        """Values one batch if there is one, and commits if it is time; returns how many samples were judged."""
        arrivals: list[Arrival] = []
        if self.config.agent.during_training == "pause" and self._training.locked():
            time.sleep(min(timeout, _PAUSE_SECONDS))
        else:
            arrivals = self.intake.take(self._batch, timeout, min(timeout, _LINGER_SECONDS))
        with self.lock:
            if arrivals:
                self.judge(arrivals)
                self._value_alone()
            now = self._last_step = time.monotonic()
            patience = self.config.store.commit_ms / 1000 * (1 if self._awaited else _UNANSWERED)
            if (
                now >= self._last_commit + patience
                or len(self.store.staged) > self._reserve - self._batch
            ):
                self.commit(whole=now - self._last_whole >= _STATISTICS_SECONDS)
            if now - self._last_housekeeping >= _HOUSEKEEPING_SECONDS:
                self._last_housekeeping = now
                self.remove_expired()
        return len(arrivals)

    def judge(self, arrivals: list[Arrival]) -> None:
        """Decides on samples; what was decided is acknowledged by the next commit."""
        start = time.perf_counter()
        form, labels = self.intake.form, self.config.samples.labels
        by_source: dict[str, list[Arrival]] = {}
        for arrival in arrivals:
            by_source.setdefault(arrival.source, []).append(self._labels.numbered(arrival))
        for source, group in by_source.items():
            self.store.source = source
            batch, sound, refused = screen(
                group, form, labels, self.tombstones.ids, self._magnitudes
            )
            for arrival, reason in refused:
                if reason not in ("shape", "erased"):
                    self.intake.refuse(
                        reason, source, {"x": arrival.x, "y": arrival.y, "id": arrival.id}, count=0
                    )
            fates = [(arrival, f"refused.{reason}") for arrival, reason in refused]
            fates += zip(sound, self._take_in(batch) if sound else (), strict=True)
            self.counters["seen"] += len(group)
            self.counters.update(fate for _, fate in fates)
            self._judged += len(group)
            self._awaited += [
                (arrival, fate) for arrival, fate in fates if arrival.acknowledge is not None
            ]
        spent = (time.perf_counter() - start) / len(arrivals)
        self.seconds_per_sample += 0.05 * (spent - self.seconds_per_sample)

    def _take_in(self, batch: Batch) -> list[str]:
        """Values and stores what is worth it; returns what became of each sample."""
        coarse = self.store.codec.coarsened
        batch = Batch(self.store.as_stored(batch.x), batch.y, batch.ids)
        self.counters["coarsened"] += self.store.codec.coarsened - coarse
        measured = self.device.measure(batch)
        if measured is not None:
            self.door.see(batch.ids)
        outcome = self.device.ingest(batch, self.store.clock.now(), measured)
        return [_FATES[fate] for fate in outcome.fates.tolist()]

    def _value_alone(self) -> None:
        """Gives a policy that wants values a direction before any server does: the mean gradient of all that came."""
        device, seen = self.device, self.device.window.count
        if self.model_date.round >= 0 or device.model is None or not device.policy.uses_direction:
            return
        if seen < self._alone_from or device.window.size != device.learner.gradient_size:
            return
        self._alone_from = (
            2 * seen
        )  # each time all that is stored is valued and ranked anew, on the disk too
        device.update_model(device.model, device.window.mean().astype(np.float32))

    def commit(self, *, wipe: bool = False, whole: bool = True) -> bool:
        """Puts all decisions on the disk, then acknowledges them; False if the disk did not take them.

        Then the samples since the last commit are dropped and counted, and all is as it was after that commit. A commit
        that is not `whole` writes samples alone: counts, rates and estimates follow within a minute.
        """
        self._last_commit = time.monotonic()
        if self.store.staged and not self.store.readable:
            whole = True
        if whole:
            self._last_whole = self._last_commit
        self.counters.update(self.intake.counted())
        judged, self._judged = self._judged, 0
        awaited, self._awaited = self._awaited, []
        parts = self._parts | self.door.kept(under_way=False)
        lost: str | None = None
        try:
            self.store.commit(snapshot_parts(parts) if whole else None, wipe=wipe)
        except OSError as error:
            log.error(
                "the store could not be written (%s): %d samples dropped", error.strerror, judged
            )
            lost, counted = "dropped.disk", self.counters.snapshot()
            self.restore(self.store.load(self.store.file.reload()))
            self.counters.restore(counted)
            self.counters[lost] += judged
        for arrival, verdict in awaited:
            arrival.answer(lost or verdict)
        return lost is None

    def remove_expired(self) -> int:
        """Removes and overwrites what is older than the TTL."""
        with self.lock:
            days, now = self.config.store.ttl_days, self.store.clock.now()
            expired = [
                id_
                for id_, note in self.store.records.items()
                if days and note.taken < now - days * DAY
            ]
            if expired:
                self.counters["expired"] += self.store.forget(expired, Verdict.EXPIRED)
                self.commit(wipe=True)
                discard_copies(self.store_path)
        return len(expired)

    def erase(self, ids: list[int]) -> int:
        """Removes samples from file, log and free space, and starts gist and estimates anew, which may know of them.

        Models that learned from them stay as they are.
        """
        with self.lock:
            self.intake.refused.clear()
            self.store.log.forget(np.array(ids, dtype=np.int64))
            erased = self.store.forget(ids, Verdict.ERASED)
            self.device.reset_statistics()
            if self.model_date.round < 0 and self.device.model is not None:
                self.device.set_model(self.device.model)  # its direction was a mean over them
                self._alone_from = _ALONE_ARRIVALS
            self.tombstones.add(ids)
            self.counters["erased"] += erased
            if not self.commit(wipe=True):
                raise RejectedError(
                    "disk", "the store cannot be written; nothing was erased, try again"
                )
            discard_copies(self.store_path)
        return erased

    def participate(self, order: TrainOrder) -> Report:
        """Trains on what is stored and adopts the order's model; the report leaves only once all is on the disk."""
        self.door.require_clear()
        return self.door.release(self._take_part(order), order)

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        """Takes part in a secure sum: the report stays here for masking, the answer is keys."""
        agreed = self.door.terms(terms)
        return self.door.hold(self.door.release(self._take_part(order), order), order, agreed)

    def answer(self, question: bytes) -> bytes:
        """The answer to a later exchange of a secure sum."""
        return self.door.answer(question)

    def _take_part(self, order: TrainOrder) -> Report:
        self.device.screen(order)
        with self._training:
            with self.lock:
                participation = Participation(self.device, order)
                participation.prepare()
                self.door.close_estimate()
            # Without the lock: whoever asks or stops the agent need not wait.
            trained = participation.train()
            with self.lock:
                report = participation.finish(trained)
                self.store.model_version = self.model_date.round = order.round
                self.model_date.received = self.store.clock.now()
                self.require_commit()
                return report

    def require_commit(self) -> None:
        """Commits, or raises: what is not on the disk must not be sent."""
        if not self.commit():
            raise RejectedError("disk", "the store cannot be written; nothing was sent")

    def profile(self) -> Profile:
        """What the device declares to the server in the clear, as far as it may."""
        return self.door.profile(self._declared)

    def encrypted_profile(self, request: ProfileRequest) -> bytes:
        """The same, for the key-holder alone."""
        return self.door.sealed_profile(request, self._declared)

    def _declared(self) -> tuple[Profile, float]:
        with self.lock:
            self.device.meter.advance(self.store.clock.now())
            return self.device.profile(), self.device.meter.span()
