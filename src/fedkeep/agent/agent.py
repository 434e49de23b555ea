"""The agent: one device, its durable store, and the loop that values, keeps and commits."""

import logging
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from fedkeep.agent.arrivals import Arrival, IngestQueue, OutlierFilter, queue_limit, screen
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.record import DAY, CounterBook, ModelVersion, Tombstones, Verdict
from fedkeep.agent.sample_ids import DeviceName, SampleIds
from fedkeep.agent.store_file import discard_copies
from fedkeep.core.device import Device
from fedkeep.core.errors import RejectedError
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
"""How old the statistics on the disk may be while the agent runs: what a crash may cost of them,
never a sample."""
_UNANSWERED = 10
"""Samples whose sender awaits no answer may wait this many times longer for a commit."""
_BATCH = 64
"""Samples that are valued together."""
_FIRST_RETRY, _LAST_RETRY = 0.5, 10.0
"""Seconds after which a disk that took no write is tried again: twice as long each time."""
_LINGER_SECONDS, _PAUSE_SECONDS = 0.01, 0.05
"""How long a batch waits to fill, and a step while training pauses it."""
_SILENCE_SECONDS = 10.0
_ALONE_ARRIVALS = 256
"""After so many, and whenever they have doubled, a device that no server has called values
against their own mean."""
_ASSIGNMENT = {"assignment.quotas", "assignment.label_weights", "assignment.mass_per_slot"}
_FATES = ("refused.score", "kept", "replaced", "refreshed")
"""How each `OfferResult` is counted and told."""


class Agent:
    """Owns device, store and model.

    All changes go through it, one at a time, and reach the disk together.
    """

    def __init__(
        self, device: Device, store: DurableStore, reserve: int, config: "AgentConfig"
    ) -> None:
        self.device, self.store, self.config = device, store, config
        self.store_path = config.store.file
        self.lock = threading.RLock()
        self.intake = IngestQueue(config.agent.queue or queue_limit(config.form), config.form)
        self.counters, self.tombstones, self.model_date = (
            CounterBook(),
            Tombstones(),
            ModelVersion(),
        )
        self.ids = SampleIds(
            {source.name: source.namespace or source.name for source in config.sources}
        )
        self.identity = DeviceName()
        self.disk_error = ""
        """Why the disk takes no writes at present; then every source is held back."""
        self.door = ReleasePipeline()
        """All that leaves the device leaves through it."""
        self.seconds_per_sample = 0.0
        self._magnitudes = OutlierFilter(config.samples.limit, config.samples.outlier)
        self._batch, self._reserve = min(_BATCH, max(1, reserve // 2)), reserve
        self._parts: dict[str, Stateful] = {
            "device": device,
            "log": store.log,
            "clock": store.clock,
            "counters": self.counters,
            "tombstones": self.tombstones,
            "model": self.model_date,
            "ids": self.ids,
            "identity": self.identity,
        }
        self._fresh = {
            name: array
            for name, array in device.snapshot().items()
            if not name.startswith("store.")
        }
        self._judged = 0
        """Samples whose fate is not on the disk yet."""
        self._awaited: list[tuple[Arrival, str]] = []
        """Those among them whose senders await an answer."""
        self._alone_from = _ALONE_ARRIVALS
        self._training = threading.Lock()
        self._next_try, self._pause = 0.0, _FIRST_RETRY
        self._last_step = self._last_commit = self._last_whole = self._last_housekeeping = (
            time.monotonic()
        )

    def alive(self) -> bool:
        """Whether the stream is still valued: a watchdog asks.

        Training may hold it up, and counts as life.
        """
        return self._training.locked() or time.monotonic() - self._last_step < _SILENCE_SECONDS

    def restore(self, state: State, *, damaged: bool = False) -> None:
        """Becomes what a file says; what is missing of the state begins anew, the samples stay."""
        found = strip_prefix("device", state)
        if damaged and not self._fresh.keys() <= found.keys():
            log.warning(
                "lost from the device's state: %s",
                ", ".join(sorted(self._fresh.keys() - found.keys())),
            )
        self.device.restore(self._mended(found))
        for name, part in (self._parts | self.door.kept(under_way=False)).items():
            if part is not self.device and (own := strip_prefix(name, state)):
                part.restore(own)
        self.ids.earlier |= bool(self.store.records or found) and not strip_prefix("ids", state)
        self.store.model_version = self.model_date.round
        self._alone_from = max(
            _ALONE_ARRIVALS, 0 if self.device.direction is None else 2 * self.device.window.count
        )
        if "counters" in found:
            caught_up = self.store.write_down_since(int(found["counters"][0]))
            self.counters.update(seen=caught_up, kept=caught_up)

    def _mended(self, found: State) -> State:
        """Return the device's state, completed where it lacks something.

        What is missing is as in a new device, or as the stored samples have it.

        A division of slots that is not one of this store's, whose budget may be another now, is
        left out.
        """
        notes, room = list(self.store.records.values()), self.device.capacity
        following = max((note.arrival for note in notes), default=-1) + 1
        arrivals, round_ = found.get("counters", np.array([0, -1])).tolist()
        state = {**self._fresh, **found, "counters": np.array([max(arrivals, following), round_])}
        counts = state["shares.counts"]
        held = np.bincount([note.region for note in notes], minlength=len(counts))
        state["shares.counts"] = np.where(counts > 0, counts, held)
        state["shares.arrivals"] = np.maximum(state["shares.arrivals"], len(notes))
        if state["shares.targets"].sum() != room:
            state["shares.targets"] = np.zeros_like(state["shares.targets"])
        gone = set() if state.keys() >= _ASSIGNMENT else _ASSIGNMENT
        if not gone and state["assignment.quotas"].sum() > room:
            log.warning(
                "the plan was for more than the %d samples that now fit: it counts no more", room
            )
            gone = _ASSIGNMENT
        if (
            (gone or self.device.policy.balanced)
            and "store.quotas" in state
            and state["store.quotas"].sum() != room
        ):
            gone = {*gone, "store.quotas"}
        return {name: array for name, array in state.items() if name not in gone}

    def step(self, timeout: float) -> int:
        """Values one batch if there is one, and commits if it is time.

        Returns how many samples were judged.
        """
        if self.disk_error:
            self._try_disk(timeout)
            return 0
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

    def _try_disk(self, timeout: float) -> None:
        """Commit what waits for the disk once it is time to try.

        Nothing new is valued until then.
        """
        now = self._last_step = time.monotonic()
        if now < self._next_try:
            self.intake.wait_stopped(min(timeout, _PAUSE_SECONDS))
            return
        with self.lock:
            self.commit()

    def judge(self, arrivals: list[Arrival]) -> None:
        """Decides on samples; what was decided is acknowledged by the next commit."""
        start = time.perf_counter()
        form, labels = self.intake.form, self.config.samples.labels
        by_source: dict[str, list[Arrival]] = {}
        for arrival in arrivals:
            by_source.setdefault(arrival.source, []).append(arrival)
        for source, group in by_source.items():
            self.store.source = source
            batch, sound, refused = screen(
                group,
                form,
                labels,
                self.tombstones.ids,
                self._magnitudes,
                self.ids,
                self.store.records,
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
        """Give a policy that wants values a direction before any server does.

        The mean gradient of all that came.
        """
        device, seen = self.device, self.device.window.count
        if self.model_date.round >= 0 or device.model is None or not device.policy.uses_direction:
            return
        if seen < self._alone_from or device.window.size != device.learner.gradient_size:
            return
        self._alone_from = (
            2 * seen
        )  # each time all that is stored is valued and ranked anew, on the disk too
        device.adopt(device.model, device.window.mean().astype(np.float32))

    def commit(self, *, whole: bool = True) -> bool:
        """Put all decisions on the disk, then acknowledge them.

        If the disk does not take them, nothing is lost and nobody is answered: decisions stay in
        memory, every source is held back, and `step` tries again until the disk recovers.

        Parameters
        ----------
        whole
            Whether counts, rates and estimates are written, too; else samples alone are, and the
            rest follows within a minute.

        Returns
        -------
        bool
            Whether the disk took them.
        """
        self._last_commit = time.monotonic()
        whole = whole or bool(self.store.staged and not self.store.readable)
        self.counters.update(self.intake.counted())
        try:
            if self.disk_error:
                # A wipe that an earlier failure left undone comes first: it must not fail half-way
                # through the commit of samples.
                self.store.file.commit([], [])
            self._write(whole=whole)
        except OSError as error:
            self._hold(error)
            return False
        if self.disk_error:
            log.info("the store can be written again: all that waited is kept")
            self.disk_error, self._pause = "", _FIRST_RETRY
            self.intake.hold(held=False)
        awaited, self._awaited = self._awaited, []
        self._judged = 0
        for arrival, verdict in awaited:
            arrival.answer(verdict)
        return True

    def _write(self, *, whole: bool, wipe: bool = False) -> None:
        """Write samples, and all else where the commit is whole.

        Raises OSError where the disk does not take them.
        """
        parts = self._parts | self.door.kept(under_way=False)
        self.store.commit(snapshot_parts(parts) if whole else None, wipe=wipe)
        if whole:
            self._last_whole = time.monotonic()

    def _hold(self, error: OSError) -> None:
        """Says once that the disk fails, and holds every source back until it is tried again."""
        reason = error.strerror or type(error).__name__
        if reason != self.disk_error:
            log.error(
                "the store cannot be written (%s): %d samples wait in memory, and all sources wait",
                reason,
                self._judged,
            )
        self.disk_error = reason
        self._next_try = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LAST_RETRY)
        self.intake.hold(held=True)

    def _commit_wiped(self) -> bool:
        """Put a removal on the disk with its free space overwritten, or take it back.

        Arrivals were committed before the removal began, so that none of them is taken back.
        """
        try:
            self._write(whole=True, wipe=True)
        except OSError as error:
            counted = self.counters.snapshot()
            self.restore(self.store.load(self.store.file.reload()))
            self.counters.restore(counted)
            self._hold(error)
            return False
        self._last_commit = time.monotonic()
        return True

    def remove_expired(self) -> int:
        """Remove and overwrites what is older than the TTL."""
        with self.lock:
            days, now = self.config.store.ttl_days, self.store.clock.now()
            expired = [
                id_
                for id_, note in self.store.records.items()
                if days and note.taken < now - days * DAY
            ]
            if not expired or not self.commit(whole=False):
                return 0
            removed = self.store.forget(expired, Verdict.EXPIRED)
            if not self._commit_wiped():
                return 0
            self.counters["expired"] += removed
            discard_copies(self.store_path)
        return len(expired)

    def erase(self, ids: list[int]) -> int:
        """Remove samples from file, log and free space.

        Gist and estimates, which may know of them, start anew.

        Models that learned from them stay as they are.
        """
        with self.lock:
            if not self.commit(whole=False):
                raise RejectedError(
                    "disk", "the store cannot be written; nothing was erased, try again"
                )
            self.intake.refused.clear()
            self.store.log.forget(np.array(ids, dtype=np.int64))
            erased = self.store.forget(ids, Verdict.ERASED)
            self.device.reset_statistics()
            if self.model_date.round < 0 and self.device.model is not None:
                self.device.set_model(self.device.model)  # its direction was a mean over them
                self._alone_from = _ALONE_ARRIVALS
            self.tombstones.add(ids)
            if not self._commit_wiped():
                raise RejectedError(
                    "disk", "the store cannot be written; nothing was erased, try again"
                )
            self.counters["erased"] += erased
            discard_copies(self.store_path)
        return erased

    def participate(self, order: TrainOrder) -> Report:
        """Trains on what is stored and adopts the order's model.

        The report leaves only once all is on the disk.
        """
        self.door.require_clear()
        return self.door.release(self._take_part(order), order)

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        """Take part in a secure sum: the report stays here for masking, the answer is keys."""
        agreed = self.door.terms(terms)
        return self.door.hold(self.door.release(self._take_part(order), order), order, agreed)

    def answer(self, question: bytes) -> bytes:
        """Return the answer to a later exchange of a secure sum."""
        return self.door.answer(question)

    def _take_part(self, order: TrainOrder) -> Report:
        self.device.screen(order)
        with self.lock:
            self.require_commit(whole=False)  # a disk that fails is found before anything changes
        with self._training:
            with self.lock:
                prepared = self.device.prepare(order)
                self.door.close_estimate()
                # Arrivals during training must not mix gradients of two models.
                self.device.set_model(order.model, order.direction)
            # Without the lock: whoever asks or stops the agent need not wait.
            train, job = self.device.learner.train, prepared.job
            trained = train(order.model, job, order.local) if len(job.batch) else order.model
            with self.lock:
                report = self.device.complete(prepared, trained)
                self.store.model_version = self.model_date.round = order.round
                self.model_date.received = self.store.clock.now()
                self.require_commit()
                return report

    def require_commit(self, *, whole: bool = True) -> None:
        """Commit, or raise: what is not on the disk must not be sent."""
        if not self.commit(whole=whole):
            raise RejectedError("disk", "the store cannot be written; nothing was sent")

    def profile(self) -> Profile:
        """Return what the device declares to the server in the clear, as far as it may."""
        return self.door.profile(self._declared)

    def encrypted_profile(self, request: ProfileRequest) -> bytes:
        """Return the same, for the key-holder alone."""
        return self.door.sealed_profile(request, self._declared)

    def _declared(self) -> tuple[Profile, float]:
        with self.lock:
            self.device.meter.advance(self.store.clock.now())
            return self.device.profile(), self.device.meter.span()
