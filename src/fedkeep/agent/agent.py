"""The agent: one device, its durable store, and the loop that values, keeps and commits."""

import logging
import math
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fedkeep.agent.arrivals import (
    Arrival,
    IngestQueue,
    OutlierFilter,
    queue_limit,
    screen,
    screen_labels,
)
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.label_names import LabelNames
from fedkeep.agent.pacing import CommitPacer
from fedkeep.agent.payloads import PayloadError
from fedkeep.agent.record import CounterBook, ModelVersion, SampleMetadata, Verdict
from fedkeep.agent.retention import DAY, ErasedIds
from fedkeep.agent.sample_ids import DeviceName, SampleIds, written_id
from fedkeep.agent.store_file import discard_copies
from fedkeep.agent.stream_watch import StreamWatch
from fedkeep.core.device import Device
from fedkeep.core.errors import RejectedError
from fedkeep.core.participation import Participation
from fedkeep.core.protocols import OfferResult, PerSampleGradients, Stateful
from fedkeep.core.rules.book import RecordContext
from fedkeep.core.state import snapshot_parts, strip_prefix
from fedkeep.core.types import AnyArray, Batch, IntArray, Profile, Report, State, TrainOrder
from fedkeep.core.waiting import UNLABELLED, LabelResult
from fedkeep.privacy.release import ReleasePipeline
from fedkeep.protocol.messages import ProfileRequest

if TYPE_CHECKING:
    from fedkeep.agent.assembly import AgentConfig
    from fedkeep.agent.remote import Remote
    from fedkeep.agent.uploads import Uploads

log = logging.getLogger(__name__)
_HOUSEKEEPING_SECONDS = 60.0
_BATCH = 64
"""Samples that are valued together."""
_LINGER_SECONDS, _PAUSE_SECONDS = 0.01, 0.05
"""How long a batch waits to fill, and a step while training pauses it."""
_SILENCE_SECONDS = 10.0
_ALONE_ARRIVALS = 256
"""After so many, and whenever they have doubled, a device that no server has called values
against their own mean."""
_FATES = ("refused.score", "kept", "replaced", "refreshed")
"""How each `OfferResult` is counted and reported."""
_WAITING_FATES = ("refused.room", "waiting", "waiting", "refreshed")
"""The same of samples without a label, in the waiting room."""
_LABEL_FATES = ("refused.no-sample", "remembered", "labelled", "known", "corrected")
"""How each `LabelResult` is counted; a label that makes its sample an arrival has its fate."""

_Fates: TypeAlias = list[tuple[Arrival, str]]
"""Arrivals, each with what became of it."""


class Agent:
    """Owns device, store and model.

    All changes go through it, one at a time, and reach the disk together.
    """

    def __init__(
        self,
        device: Device,
        store: DurableStore,
        reserve: int,
        config: "AgentConfig",
        decode: Callable[[bytes], AnyArray] | None = None,
    ) -> None:
        self.device, self.store, self.config = device, store, config
        self.store_path = config.store.file
        self.lock = threading.RLock()
        self.intake = IngestQueue(config.agent.queue or queue_limit(config.form), config.form)
        self.counters, self.tombstones, self.model_date = (
            CounterBook(),
            ErasedIds(config.store.erasure_bytes),
            ModelVersion(),
        )
        self.ids = SampleIds(
            {source.name: source.namespace or source.name for source in config.sources}
        )
        self.identity = DeviceName()
        self.disk_error = ""
        """Why the disk takes no writes at present; then every source is held back."""
        self.writes_spent = False
        """Whether `daily_writes` allows no more for now; then nothing is valued until it does."""
        self.release_pipeline = ReleasePipeline()
        """All that leaves the device leaves through it."""
        self.seconds_per_sample = 0.0
        self._ttl = {
            rule.name: rule.ttl_days for rule in config.method.rules if rule.ttl_days is not None
        }
        """Days for which rules let stay what they hold, where they say so."""
        self.uploads: Uploads | None = None
        """What leaves the device by consent; None: no sample does."""
        self.remote: Remote | None = None
        """Who may change settings from afar; None: nobody."""
        self.decode = decode
        """Makes numbers of files, where samples are files."""
        self._labels = LabelNames(config.samples.names)
        self._magnitudes = OutlierFilter(config.samples.limit, config.samples.outlier)
        self._batch, self._reserve = min(_BATCH, max(1, reserve // 2)), reserve
        self._pacer = CommitPacer(
            config.store.commit_ms / 1000,
            config.store.daily_writes,
            lambda: store.file.disk.block_bytes,
        )
        # The release pipeline is set later, so that it is looked up whenever samples enter.
        device.entering = lambda ids: self.release_pipeline.see(ids)  # noqa: PLW0108
        device.counted = self._watch_arrivals
        self.watch = StreamWatch(
            config.drift,
            config.samples.count,
            config.samples.names,
            [source.name for source in config.sources],
            store.clock.now(),
        )
        """What is noticed of the stream: changes, and silence."""
        device.context_of = self._context_of
        self._fields: dict[int, Mapping[str, Any]] = {}
        """What records say of themselves whose samples wait; a kill forgets it."""
        self._coming: dict[int, RecordContext] = {}
        """What rules may know of the samples without labels that are being judged."""
        self._parts: dict[str, Stateful] = {
            "device": device,
            "log": store.log,
            "clock": store.clock,
            "counters": self.counters,
            "tombstones": self.tombstones,
            "model": self.model_date,
            "ids": self.ids,
            "identity": self.identity,
            "pacer": self._pacer,
        }
        self._judged = 0
        """Samples whose fate is not on the disk yet."""
        self._awaited: list[tuple[Arrival, str]] = []
        """Those among them whose senders await an answer."""
        self._awaited_whole: list[tuple[Arrival, str]] = []
        """The same of what only a whole commit brings to the disk: labels before their samples."""
        self._alone_from = _ALONE_ARRIVALS
        self._training = threading.Lock()
        self._spent_before = False
        self._last_step = self._last_housekeeping = time.monotonic()

    @property
    def waiting(self) -> str:
        """Why nothing is valued at present; empty while arrivals are."""
        if self.disk_error:
            return f"the disk takes no writes: {self.disk_error}"
        return "[store] daily_writes allows no more for now" if self.writes_spent else ""

    def alive(self) -> bool:
        """Whether the stream is still valued: a watchdog asks.

        Training may hold it up, and counts as life.
        """
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
        if self.device.waiting is None and (gone := self.store.drop_unlabelled()):
            log.warning("%d samples waited for labels and go: [waiting] share is 0 now", gone)
        for name, part in (self._parts | self.release_pipeline.kept(under_way=False)).items():
            if part is not self.device and (own := strip_prefix(name, state)):
                part.restore(own)
        if not strip_prefix("ids", state) and not (damaged and self.store.name_bytes):
            # Only a version before leaves none; a store with names is none of that version's.
            self.ids.earlier |= bool(self.store.records or found)
        self.store.model_version = self.model_date.round
        self._alone_from = max(
            _ALONE_ARRIVALS,
            0 if self.device.global_gradient is None else 2 * self.device.window.count,
        )
        if "counters" in found:
            caught_up = self.store.write_down_since(int(found["counters"][0]))
            self.counters.update(seen=caught_up, kept=caught_up)

    def step(self, timeout: float) -> int:
        """Values one batch if there is one, and commits if it is time.

        Returns how many samples were judged.
        """
        if self.disk_error:
            self._try_disk(timeout)
            return 0
        arrivals: list[Arrival] = []
        with self.lock:
            pauses = self._pauses()
        if pauses:
            self.intake.wait_stopped(min(timeout, _PAUSE_SECONDS))
        else:
            arrivals = self.intake.take(self._batch, timeout, min(timeout, _LINGER_SECONDS))
        with self.lock:
            if arrivals:
                self.judge(arrivals)
                self._value_alone()
            self.counters.update(self.intake.counted())
            now = self._last_step = time.monotonic()
            full = self.store.staged_samples > self._reserve - self._batch
            early = bool(self._awaited_whole) and self._whole_due()
            if full or early or self._pacer.due(awaited=bool(self._awaited)):
                self.commit(whole=self._whole_due())
            if now - self._last_housekeeping >= _HOUSEKEEPING_SECONDS:
                self._last_housekeeping = now
                self.remove_expired()
                self._look_for_silence()
        return len(arrivals)

    def _pauses(self) -> bool:
        """Whether arrivals are left in the queue, which fills as each source's `overload` says.

        An agent that stops takes what it has read, since not every stream can give it again.
        """
        spent, self.writes_spent = self.writes_spent, self._pacer.exhausted()
        if self.writes_spent and not (spent or self._spent_before):
            self._spent_before = True
            log.warning(
                "[store] daily_writes allows no more for now: arrivals wait, or are skipped where "
                "their source's overload says so"
            )
        if self.config.agent.during_training == "pause" and self._training.locked():
            return True
        return self.writes_spent and not self.intake.stopped

    def _look_for_silence(self) -> None:
        """Say which sources are silent, unless the agent itself holds them back."""
        if self.waiting:
            self.watch.postpone(self.store.clock.now())
        self.watch.look(self.store.clock.now())

    def _watch_arrivals(self, batch: Batch, measured: PerSampleGradients | None) -> None:
        """Look whether the stream has changed, in samples that count from now on."""
        now, form = self.store.clock.now(), self.intake.form
        if not self.watch.wants(len(batch), now):
            return
        y = batch.y if form.targets is None else form.targets.assign(batch.y)
        # Where nothing else asks for a measurement, a loss would cost a forward pass of its own.
        at_hand = self.device.window.size > 0 or self.device.policy.needs_model
        losses = measured.losses() if at_hand and measured is not None else None
        if changed := self.watch.observe(y, losses, now):
            self.counters[f"drift.{changed}"] += 1

    def _try_disk(self, timeout: float) -> None:
        """Commit what waits for the disk once it is time to try.

        Nothing new is valued until then.
        """
        self._last_step = time.monotonic()
        if not self._pacer.retry_due():
            self.intake.wait_stopped(min(timeout, _PAUSE_SECONDS))
            return
        with self.lock:
            self.commit()

    def judge(self, arrivals: list[Arrival]) -> None:
        """Decides on samples; what was decided is acknowledged by the next commit."""
        start = time.perf_counter()
        by_source: dict[str, list[Arrival]] = {}
        for arrival in arrivals:
            by_source.setdefault(arrival.source, []).append(self._labels.numbered(arrival))
        for source, group in by_source.items():
            self.store.source = source
            self.watch.arrived(source, self.store.clock.now())
            for kind, same in groupby(group, self._kind):
                self._settle(kind(self, source, list(same)))
        spent = (time.perf_counter() - start) / len(arrivals)
        self.seconds_per_sample += 0.05 * (spent - self.seconds_per_sample)

    def _kind(self, arrival: Arrival) -> "Callable[[Agent, str, list[Arrival]], _Fates]":
        """Return what judges such an arrival: a label, a sample without one, or with one."""
        if arrival.label_only:
            return Agent._judge_labels
        unlabelled = arrival.y is None and self.device.waiting is not None
        return Agent._judge_unlabelled if unlabelled else Agent._judge_samples

    def _settle(self, fates: "_Fates") -> None:
        """Count fates, and note who awaits them."""
        self.counters["seen"] += len(fates)
        self.counters.update(fate for _, fate in fates)
        self._judged += len(fates)
        for arrival, fate in fates:
            if arrival.acknowledge is not None:
                early = fate == _LABEL_FATES[LabelResult.EARLY]
                (self._awaited_whole if early else self._awaited).append((arrival, fate))

    def _judge_samples(self, source: str, group: list[Arrival]) -> "_Fates":
        batch, sound, fates = self._screened(source, group, labelled=True)
        return fates + list(zip(sound, self._take_in(batch, sound) if sound else (), strict=True))

    def _judge_unlabelled(self, source: str, group: list[Arrival]) -> "_Fates":
        batch, sound, fates = self._screened(source, group, labelled=False)
        if not sound:
            return fates
        x = self._coarsened(batch.x)
        if self.device.rules is not None:
            batch, sound, forbidden = self._ask_rules(Batch(x, batch.y, batch.ids), sound)
            fates, x = fates + forbidden, batch.x
        if not sound:
            return fates
        wanted = self.store.wanted
        results = self.device.wait(x, batch.ids, self.store.clock.now(), held=wanted)
        names = [(_FATES if stored else _WAITING_FATES)[result] for result, stored in results]
        self._remember_fields(batch.ids, sound)
        return fates + list(zip(sound, names, strict=True))

    def _ask_rules(
        self, batch: Batch, arrivals: list[Arrival]
    ) -> "tuple[Batch, list[Arrival], _Fates]":
        """Return samples without labels that may wait, and the fates of those that may not.

        The store learns which of them rules want kept, and what came shortly before those.
        """
        store, room, rules = self.store, self.device.waiting, self.device.rules
        assert room is not None
        assert rules is not None
        wall = store.clock.wall()
        ids = batch.ids.tolist()
        times = np.array([wall if math.isnan(one.time) else one.time for one in arrivals])
        self._coming = {
            id_: RecordContext([one.fields], store.source, times[i : i + 1])
            for i, (id_, one) in enumerate(zip(ids, arrivals, strict=True))
        }
        new = np.array([id_ not in store.records and id_ not in store.unlabelled for id_ in ids])
        context = RecordContext(
            [one.fields for one, is_new in zip(arrivals, new, strict=True) if is_new],
            store.source,
            times[new],
        )
        allowed = np.ones(len(ids), dtype=bool)
        allowed[new], store.wanted = self.device.screen_unlabelled(
            batch.x[new], batch.ids[new], context
        )
        for id_, names in store.wanted.items():
            if id_ in store.unlabelled and room.hold(id_):
                store.want(id_, room.x([id_])[0], names)
        for name in dict.fromkeys(rules.refused.values()):
            chosen = np.array([rules.refused.get(id_) == name for id_ in ids])
            unlabelled = np.full(len(ids), UNLABELLED)
            store.log_forbidden(Batch(batch.x, unlabelled, batch.ids).take(chosen), name)
        kept, fates = [], []
        for arrival, may in zip(arrivals, allowed.tolist(), strict=True):
            if may:
                kept.append(arrival)
            else:
                fates.append((arrival, "refused.rule"))
        return batch.take(allowed), kept, fates

    def _remember_fields(self, ids: IntArray, arrivals: list[Arrival]) -> None:
        """Keep what rules may want to know of waiting samples, once their labels come."""
        self._coming, self.store.wanted = {}, {}
        if self.device.rules is None:
            return
        for id_, arrival in zip(ids.tolist(), arrivals, strict=True):
            if arrival.fields and id_ in self.store.unlabelled:
                self._fields[id_] = arrival.fields
        if len(self._fields) > 2 * len(self.store.unlabelled):
            waiting = self.store.unlabelled
            self._fields = {id_: own for id_, own in self._fields.items() if id_ in waiting}

    def _context_of(self, id_: int) -> RecordContext | None:
        """Tell what rules may know of a sample whose label comes now."""
        note = self.store.unlabelled.get(id_)
        if note is None:
            coming = self._coming.get(id_)
            wanted = self.store.wanted.get(id_, ())
            return None if coming is None else replace(coming, matched=[wanted])
        time = note.wall if math.isnan(note.time) else note.time
        fields = self._fields.pop(id_, {})
        return RecordContext([fields], note.source, np.array([time]), [note.rules])

    def _judge_labels(self, source: str, group: list[Arrival]) -> "_Fates":
        labels, targets = self.config.samples.count, self.intake.form.targets
        known = ChainMap(self.store.records, self.store.unlabelled)
        ids, y, sound, refused = screen_labels(
            group, labels, self.tombstones, self.ids, known, targets
        )
        self._show_refused(source, refused)
        fates = [(arrival, f"refused.{reason}") for arrival, reason in refused]
        rules = self.device.rules
        for i, arrival in enumerate(sound):
            one = slice(i, i + 1)
            [(result, fate)] = self.device.label(ids[one], y[one], self.store.clock.now())
            fate_name = _LABEL_FATES[result] if fate is None else _FATES[fate]
            if result == LabelResult.LABELLED:
                self.counters["labelled"] += 1
                if rules is not None and (name := rules.refused.get(int(ids[i]))):
                    none = np.zeros((1, 0), np.float32)
                    self.store.log_forbidden(Batch(none, y[one], ids[one]), name)
                    fate_name = "refused.rule"
            fates.append((arrival, fate_name))
        return fates

    def _screened(
        self, source: str, group: list[Arrival], *, labelled: bool
    ) -> "tuple[Batch, list[Arrival], _Fates]":
        """Return valid samples with their arrivals, and the fates of the others."""
        form, labels = self.intake.form, self.config.samples.count
        if self.decode is not None:
            self._make_numbers(group)
        known = ChainMap(self.store.records, self.store.unlabelled)
        batch, sound, refused = screen(
            group,
            form,
            labels,
            self.tombstones,
            self._magnitudes,
            self.ids,
            known,
            form.targets,
            labelled=labelled,
        )
        self._show_refused(source, refused)
        self.store.names = {
            id_: name
            for id_, arrival in zip(batch.ids.tolist(), sound, strict=True)
            if (name := written_id(arrival.id)) != str(id_)
        }
        self._note_beside(batch, sound)
        return batch, sound, [(arrival, f"refused.{reason}") for arrival, reason in refused]

    def _show_refused(self, source: str, refused: list[tuple[Arrival, str]]) -> None:
        for arrival, reason in refused:
            if arrival.x is not None and reason != "erased":
                record = {"x": arrival.x, "y": arrival.y, "id": arrival.id}
                self.intake.refuse(reason, source, record, count=0)

    def _make_numbers(self, arrivals: list[Arrival]) -> None:
        """Decode files; one that is none of the decoder's gets the reason instead of numbers."""
        assert self.decode is not None
        for arrival in arrivals:
            if arrival.x is None:
                continue
            arrival.payload, arrival.x = arrival.x, None
            try:
                arrival.x = self.decode(arrival.payload)
            except PayloadError as error:
                arrival.wrong = error.reason
                shown = f"{written_id(arrival.id)}: {len(arrival.payload)} bytes: {error}"
                self.intake.refuse(error.reason, arrival.source, shown, count=0)

    def _note_beside(self, batch: Batch, arrivals: list[Arrival]) -> None:
        """Give the store what is kept beside the numbers of a batch: own times, and files."""
        now = self.store.clock.wall()
        behind, ahead = self.config.samples.latest_days * DAY, self.config.store.tolerance
        self.store.times, self.store.payloads = {}, {}
        for id_, arrival in zip(batch.ids.tolist(), arrivals, strict=True):
            if arrival.payload is not None:
                self.store.payloads[id_] = arrival.payload
            if not math.isnan(arrival.time):
                self.store.times[id_] = arrival.time
                if not now - behind <= arrival.time <= now + ahead:
                    self.counters["time.doubted"] += 1

    def _take_in(self, batch: Batch, arrivals: list[Arrival]) -> list[str]:
        """Value and store what is worth it; returns what became of each sample.

        One that is stored, or came earlier in the batch, changes nothing: no key is drawn and
        nothing counts twice.
        """
        first = np.zeros(len(batch), dtype=bool)
        first[np.unique(batch.ids, return_index=True)[1]] = True
        first &= np.array([id_ not in self.store.records for id_ in batch.ids.tolist()], dtype=bool)
        fates = [_FATES[OfferResult.REFRESHED]] * len(batch)
        new = np.flatnonzero(first)
        if len(new):
            came = [arrivals[place] for place in new.tolist()]
            for place, fate in zip(new.tolist(), self._value(batch.take(new), came), strict=True):
                fates[place] = fate
        return fates

    def _value(self, batch: Batch, arrivals: list[Arrival]) -> list[str]:
        """Decide on samples of which none is stored; returns their fates."""
        batch = Batch(self._coarsened(batch.x), batch.y, batch.ids)
        measured = self.device.measure(batch)
        rules, context = self.device.rules, None
        if rules is not None:
            now = self.store.clock.wall()
            times = np.array([arrival.time for arrival in arrivals])
            times[np.isnan(times)] = now
            fields = [arrival.fields for arrival in arrivals]
            context = RecordContext(fields, self.store.source, times)
        outcome = self.device.ingest(batch, self.store.clock.now(), measured, context)
        fates = [_FATES[fate] for fate in outcome.results.tolist()]
        if rules is not None and rules.refused:
            fates = self._forbidden(batch, fates, rules.refused)
        return fates

    def _forbidden(self, batch: Batch, fates: list[str], refused: dict[int, str]) -> list[str]:
        """Note which samples of a batch rules never store; returns all fates."""
        for name in dict.fromkeys(refused.values()):
            chosen = np.array([refused.get(id_) == name for id_ in batch.ids.tolist()])
            self.store.log_forbidden(batch.take(chosen), name)
        ids = batch.ids.tolist()
        return [
            "refused.rule" if i in refused else fate for i, fate in zip(ids, fates, strict=True)
        ]

    def _coarsened(self, x: AnyArray) -> AnyArray:
        """Return samples as the store gives them back, and count those that lost precision."""
        coarse = self.store.codec.coarsened
        x = self.store.as_stored(x)
        self.counters["coarsened"] += self.store.codec.coarsened - coarse
        return x

    def _value_alone(self) -> None:
        """Give a policy that wants values a direction before any server does.

        The mean gradient of all that came.
        """
        device, seen = self.device, self.device.window.count
        if (
            self.model_date.round >= 0
            or device.model is None
            or not device.policy.uses_global_gradient
        ):
            return
        if seen < self._alone_from or device.window.size != device.learner.gradient_size:
            return
        self._alone_from = (
            2 * seen
        )  # each time all that is stored is valued and ranked anew, on the disk too
        device.update_model(device.model, device.window.mean().astype(np.float32))

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
        whole = whole or self.store.needs_whole
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
            self.disk_error = ""
            self.intake.hold(held=False)
        awaited, self._awaited = self._awaited, []
        if whole:
            awaited, self._awaited_whole = awaited + self._awaited_whole, []
        self._judged = 0
        for arrival, verdict in awaited:
            arrival.answer(verdict)
        return True

    def _whole_due(self) -> bool:
        """Whether the next commit is to write all: also soon after a label before its sample."""
        return self._pacer.whole_due(awaited=bool(self._awaited_whole))

    def _write(self, *, whole: bool, wipe: bool = False) -> None:
        """Write samples, and all else where the commit is whole.

        Raises OSError where the disk does not take them.
        """
        parts = self._parts | self.release_pipeline.kept(under_way=False)
        kept = len(self.store.staged)
        self.store.commit(snapshot_parts(parts) if whole else None, wipe=wipe)
        self._pacer.committed(kept, whole=whole)

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
        self._pacer.failed()
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
        return True

    def remove_expired(self) -> int:
        """Remove and overwrite what is older than the TTL.

        So is what a damaged file gave back though it was erased.
        """
        with self.lock:
            days, erased = self.config.store.ttl_days, self.tombstones.ids
            self.store.clock.look()
            notes = [*self.store.records.items(), *self.store.unlabelled.items()]
            expired = [
                id_
                for id_, note in notes
                if id_ in erased
                or ((most := self._ttl_of(id_, days)) and self._age(note) > most * DAY)
            ]
            if not expired or not self.commit(whole=bool(self._awaited_whole)):
                return 0
            removed = self._forget(expired, Verdict.EXPIRED)
            if not self._commit_wiped():
                return 0
            self.counters["expired"] += removed
            discard_copies(self.store_path)
        return len(expired)

    def _ttl_of(self, id_: int, days: float) -> float:
        """Return the days for which a sample may be stored; 0: for ever.

        The longest of the rules that hold it and say so, instead of the store's.
        """
        if not self._ttl:
            return days
        waiting = self.store.unlabelled.get(id_)
        holders = self.store.holders(id_) if waiting is None else waiting.rules
        return max((self._ttl[name] for name in holders if name in self._ttl), default=days)

    def _age(self, note: SampleMetadata) -> float:
        """Return for how many seconds a sample has certainly been there.

        Its own time may make it older than its arrival, as far as that is believed, never younger.
        """
        begun = note.wall
        if note.wall - self.config.samples.latest_days * DAY <= note.time < note.wall:
            begun = note.time
        return self.store.clock.age(note.taken, begun)

    def erase(self, ids: list[int]) -> int:
        """Remove samples from file, log and free space.

        Gist and estimates, which may know of them, start anew.

        Models that learned from them stay as they are.
        """
        with self.lock:
            if not self.commit(whole=bool(self._awaited_whole)):
                raise RejectedError(
                    "disk", "the store cannot be written; nothing was erased, try again"
                )
            self.intake.refused.clear()
            self.store.log.forget(np.array(ids, dtype=np.int64))
            erased = self._forget(ids, Verdict.ERASED)
            self.device.reset_statistics()
            if self.model_date.round < 0 and self.device.model is not None:
                self.device.set_model(self.device.model)  # its direction was a mean over them
                self._alone_from = _ALONE_ARRIVALS
            forgotten = self.tombstones.add(ids)
            if not self._commit_wiped():
                raise RejectedError(
                    "disk", "the store cannot be written; nothing was erased, try again"
                )
            if forgotten:
                log.warning(
                    "%d ids that were erased long ago would be taken again: "
                    "[store] erased_bytes remembers %d",
                    forgotten,
                    self.tombstones.capacity,
                )
            self.counters["erased"] += erased
            discard_copies(self.store_path)
        return erased

    def _forget(self, ids: list[int], verdict: Verdict) -> int:
        """Drop samples for good, waiting ones and early labels too; gives how many there were."""
        for id_ in ids:
            self._fields.pop(id_, None)
        if self.device.waiting is not None:
            waited = self.device.waiting.forget(np.array(ids, dtype=np.int64))
            if verdict == Verdict.EXPIRED:
                self.device.waiting.counts["expired"] += waited
        return self.store.forget(ids, verdict)

    def participate(self, order: TrainOrder) -> Report:
        """Trains on what is stored and adopts the order's model.

        The report leaves only once all is on the disk.
        """
        self.release_pipeline.require_clear()
        return self.release_pipeline.release(self._take_part(order), order)

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        """Take part in a secure sum: the report stays here for masking, the answer is keys."""
        agreed = self.release_pipeline.terms(terms)
        return self.release_pipeline.hold(
            self.release_pipeline.release(self._take_part(order), order), order, agreed
        )

    def answer(self, question: bytes) -> bytes:
        """Return the answer to a later exchange of a secure sum."""
        return self.release_pipeline.answer(question)

    def _take_part(self, order: TrainOrder) -> Report:
        self.device.screen(order)
        with self.lock:
            self.require_commit(whole=False)  # a disk that fails is found before anything changes
        with self._training:
            with self.lock:
                participation = Participation(self.device, order)
                participation.prepare()
                self.release_pipeline.close_estimate()
            # Without the lock: whoever asks or stops the agent need not wait.
            trained = participation.train()
            with self.lock:
                report = participation.finish(trained)
                self.store.model_version = self.model_date.round = order.round
                now = self.model_date.received = self.store.clock.now()
                correction = None if self.device.gist is None else self.device.gist.latest
                rho = None if correction is None else correction.rho
                if changed := self.watch.took_part(rho, now):
                    self.counters[f"drift.{changed}"] += 1
                self.require_commit()
                return report

    def require_commit(self, *, whole: bool = True) -> None:
        """Commit, or raise: what is not on the disk must not be sent."""
        if not self.commit(whole=whole):
            raise RejectedError("disk", "the store cannot be written; nothing was sent")

    def profile(self) -> Profile:
        """Return what the device declares to the server in the clear, as far as it may."""
        return self.release_pipeline.profile(self._declared)

    def encrypted_profile(self, request: ProfileRequest) -> bytes:
        """Return the same, for the key-holder alone."""
        return self.release_pipeline.sealed_profile(request, self._declared)

    def _declared(self) -> tuple[Profile, float]:
        with self.lock:
            self.device.meter.advance(self.store.clock.now())
            return self.device.profile(), self.device.meter.span()
