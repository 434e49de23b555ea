"""The agent: one device, its durable store, and the loop that values, keeps and commits."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedkeep.agent.arrivals import Arrival, Intake
from fedkeep.agent.audit import Verdict
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.form import SampleForm
from fedkeep.agent.ledgers import CounterBook, ModelDate, Tombstones
from fedkeep.agent.opening import discard_set_aside
from fedkeep.agent.options import AgentOptions
from fedkeep.agent.screening import screen
from fedkeep.core.device import Device, Prepared
from fedkeep.core.errors import RefusedError
from fedkeep.core.ports import Fate, Kept
from fedkeep.core.types import Profile, Report, State, TrainOrder, Vector

if TYPE_CHECKING:
    from fedkeep.privacy.encrypted import EncryptedProfile, ProfileRequest
    from fedkeep.privacy.guard import Spending
    from fedkeep.privacy.sum_member import SumMember

log = logging.getLogger(__name__)
_HOUSEKEEPING_SECONDS = 60.0
_PAUSE_SECONDS = 0.05


class Gate(Kept, Protocol):
    """Decides what may leave the device: the privacy guard, whose ledger is committed with everything else."""

    def release(self, report: Report, order: TrainOrder) -> Report:
        """What may be sent of a report; raises where nothing may."""

    def release_profile(self, profile: Profile, window: float) -> Profile: ...

    def spending(self) -> Spending: ...


class Sealer(Protocol):
    """Encrypts profiles under the key-holder's key."""

    def seal(self, request: ProfileRequest, profile: Profile) -> EncryptedProfile: ...


class Agent:
    """Owns device, store and model; all changes go through it, one at a time, and reach the disk together."""

    def __init__(
        self,
        device: Device,
        store: DurableStore,
        form: SampleForm,
        labels: int,
        options: AgentOptions,
        *,
        commit_seconds: float,
        ttl_seconds: float,
        reserve: int,
        store_path: Path,
        preset: str = "default",
    ) -> None:
        self.device, self.store, self.options = device, store, options
        self.lock = threading.RLock()
        self.intake = Intake(options.queue, form)
        self.counters = CounterBook()
        self.tombstones = Tombstones()
        self.labels, self.preset = labels, preset
        self.seconds_per_sample = 0.0
        self.model_date = ModelDate()
        self._form, self._store_path = form, store_path
        self._batch = min(options.batch, max(1, reserve // 2))
        self._reserve = reserve
        self._commit_seconds, self._ttl = commit_seconds, ttl_seconds
        self._parts: dict[str, Kept] = {
            "device": device,
            "log": store.log,
            "clock": store.clock,
            "counters": self.counters,
            "tombstones": self.tombstones,
            "model": self.model_date,
        }
        self._fresh = {name: array for name, array in device.snapshot().items() if not name.startswith("store.")}
        self._judged: list[tuple[Arrival, str]] = []
        self._training = threading.Lock()
        self._gate: Gate | None = None
        self._member: SumMember | None = None
        self._sealer: Sealer | None = None
        self._last_commit = self._last_housekeeping = time.monotonic()

    def guard(self, gate: Gate) -> None:
        """Puts a gate between the device and the server; to be called before `restore`."""
        self._gate = gate
        self._parts["gate"] = gate

    def hide(self, member: SumMember) -> None:
        """From now on reports leave in secure sums only; to be called before `restore`.

        Only what the running sum counts is kept on the disk: an agent that restarts in the middle of a sum has
        dropped out of it.
        """
        self._member = member
        self._parts["sums"] = member.differences

    def seal_profiles(self, sealer: Sealer) -> None:
        """From now on no profile leaves the device unencrypted."""
        self._sealer = sealer

    def spending(self) -> Spending | None:
        """What the device's privacy ledger says; None without a gate."""
        return None if self._gate is None else self._gate.spending()

    # -- state -----------------------------------------------------------------------------------------------------

    def restore(self, state: State) -> None:
        """Becomes what a file says; a part of the state that was damaged begins anew, the samples stay."""
        self.device.restore(self._mended(_part(state, "device")))
        for name, part in self._parts.items():
            own = _part(state, name)
            if own and part is not self.device:
                part.restore(own)
        self.store.model_version = self.model_date.round
        self._freeze_vectors()

    def _mended(self, found: State) -> State:
        """The device's state with what is missing as in a new device, or as the stored samples tell it."""
        notes = self.store.notes_loaded()
        told = {
            "counters": np.array([max((note.arrival for note in notes), default=-1) + 1, -1]),
            "start.seen": np.unique([note.region for note in notes]).astype(np.int64),
        }
        state = {**self._fresh, **told, **found}
        if not found.keys() >= _ASSIGNMENT:
            state = {name: array for name, array in state.items() if name not in _ASSIGNMENT}
        if found and not self._fresh.keys() <= found.keys():
            log.warning("lost from the device's state: %s", ", ".join(sorted(self._fresh.keys() - found.keys())))
        return state

    def _freeze_vectors(self) -> None:
        """Models and directions are replaced, never written to; saying so lets a commit skip them unread."""
        for vector in (self.device.model, self.device.direction):
            if vector is not None:
                vector.flags.writeable = False

    def _state(self) -> State:
        return {f"{name}.{key}": array for name, part in self._parts.items() for key, array in part.snapshot().items()}

    # -- the stream ------------------------------------------------------------------------------------------------

    def step(self, timeout: float) -> int:
        """Values one batch if there is one, and commits if it is time; returns how many samples were judged."""
        arrivals = self._next_arrivals(timeout)
        with self.lock:
            if arrivals:
                self.judge(arrivals)
            now = time.monotonic()
            if now - self._last_commit >= self._commit_seconds or self.store.pending > self._reserve - self._batch:
                self.commit()
            if now - self._last_housekeeping >= _HOUSEKEEPING_SECONDS:
                self._last_housekeeping = now
                self.remove_expired()
        return len(arrivals)

    def _next_arrivals(self, timeout: float) -> list[Arrival]:
        """What waits to be valued; while the device trains nothing, where it is told to pause."""
        if self.options.during_training == "pause" and self._training.locked():
            time.sleep(min(timeout, _PAUSE_SECONDS))
            return []
        return self.intake.take(self._batch, timeout, self.options.linger_ms / 1000)

    def judge(self, arrivals: list[Arrival]) -> None:
        """Decides on samples; what was decided is acknowledged by the next commit."""
        start = time.perf_counter()
        by_source: dict[str, list[Arrival]] = {}
        for arrival in arrivals:
            by_source.setdefault(arrival.source, []).append(arrival)
        for source, group in by_source.items():
            self.store.source = source
            self._judge_group(group)
        spent = (time.perf_counter() - start) / len(arrivals)
        self.seconds_per_sample += 0.05 * (spent - self.seconds_per_sample)

    def _judge_group(self, arrivals: list[Arrival]) -> None:
        batch, sound, refused = screen(arrivals, self._form, self.labels, self.tombstones.ids)
        self.counters.add("seen", len(arrivals))
        for arrival, reason in refused:
            self.counters.add(f"refused.{reason}")
            self._judged.append((arrival, f"refused.{reason}"))
        if not len(batch):
            return
        outcome = self.device.take_in(batch, self.store.clock.now(), self.device.measure(batch))
        names = [_FATES[fate] for fate in outcome.fates.tolist()]
        self.counters.add_all(Counter(names))
        self._judged += zip(sound, names, strict=True)

    def commit(self, *, wipe: bool = False) -> bool:
        """Puts all decisions on the disk, then acknowledges them; False if the disk did not take them.

        Then the samples since the last commit are dropped and counted, and all is as it was after that commit.
        """
        self._last_commit = time.monotonic()
        self.counters.add_all(self.intake.counted())
        judged, self._judged = self._judged, []
        lost: str | None = None
        try:
            self.store.commit(self._state(), wipe=wipe)
        except OSError as error:
            log.error("the store could not be written (%s): %d samples dropped", error.strerror, len(judged))
            self._roll_back(len(judged))
            lost = "dropped.disk"
        for arrival, verdict in judged:
            if arrival.acknowledge is not None:
                arrival.acknowledge(lost or verdict)
        return lost is None

    def _roll_back(self, dropped: int) -> None:
        counted = self.counters.snapshot()
        self.restore(self.store.reload())
        self.counters.restore(counted)
        self.counters.add("dropped.disk", dropped)

    # -- retention -------------------------------------------------------------------------------------------------

    def remove_expired(self) -> int:
        """Removes and overwrites what is older than the TTL."""
        if not self._ttl:
            return 0
        oldest = self.store.clock.now() - self._ttl
        with self.lock:
            expired = [note.id for note in self.store.notes() if note.taken < oldest]
            if expired:
                self.counters.add("expired", self.store.forget(expired, Verdict.EXPIRED))
                self.commit(wipe=True)
                discard_set_aside(self._store_path)
        return len(expired)

    def erase(self, ids: list[int]) -> int:
        """Removes samples from file, log and free space; models that learned from them stay as they are."""
        with self.lock:
            self.store.log.forget(np.array(ids, dtype=np.int64))
            erased = self.store.forget(ids, Verdict.ERASED)
            self.tombstones.add(ids)
            self.counters.add("erased", erased)
            if not self.commit(wipe=True):
                raise RefusedError("disk", "the store cannot be written; nothing was erased, try again")
            discard_set_aside(self._store_path)
        return erased

    # -- taking part -----------------------------------------------------------------------------------------------

    def participate(self, order: TrainOrder) -> Report:
        """Trains on what is stored and adopts the order's model; the report leaves only once all is on the disk."""
        if self._member is not None:
            raise RefusedError("in the clear", "privacy.secure_sum is set here: this device answers secure orders only")
        return self._take_part(order)

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        """Takes part in a secure sum: the report stays here for masking, the answer is keys."""
        member = self._hiding()
        agreed = member.terms(terms)
        report = self._take_part(order)
        with self.lock:
            keys = member.hold(report, order, agreed)
            self.require_commit()
        return keys

    def answer(self, question: bytes) -> bytes:
        """The answer to a later exchange of a secure sum."""
        with self.lock:
            return self._hiding().answer(question)

    def _hiding(self) -> SumMember:
        if self._member is None:
            raise RefusedError(
                "not-secure", "this agent masks nothing: set privacy.secure_sum on both sides, or on none"
            )
        return self._member

    def _take_part(self, order: TrainOrder) -> Report:
        self.device.screen(order)
        with self._training:
            with self.lock:
                prepared = self.device.prepare(order)
                # Arrivals during training must not mix gradients of two models.
                self.device.install(order.model, order.direction)
            trained = self._train(prepared)  # without the lock: whoever asks or stops the agent need not wait
            with self.lock:
                return self._complete(prepared, trained)

    def _train(self, prepared: Prepared) -> Vector:
        order, job = prepared.order, prepared.job
        return self.device.learner.train(order.model, job, order.local) if len(job.batch) else order.model

    def _complete(self, prepared: Prepared, trained: Vector) -> Report:
        report = self.device.complete(prepared, trained)
        self.model_date.round, self.model_date.received = prepared.order.round, self.store.clock.now()
        self.store.model_version = self.model_date.round
        self.require_commit()
        return report if self._gate is None else self._gate.release(report, prepared.order)

    def require_commit(self) -> None:
        """Commits, or raises: what is not on the disk must not be sent."""
        if not self.commit():
            raise RefusedError("disk", "the store cannot be written; nothing was sent")

    def profile(self) -> Profile:
        """What the device declares to the server in the clear, as far as it may."""
        if self._sealer is not None:
            raise RefusedError("profile asked in the clear", "this device encrypts its profile: nothing was sent")
        return self._declared()

    def encrypted_profile(self, request: ProfileRequest) -> EncryptedProfile:
        """The same, for the key-holder alone; encrypting takes a second, and the stream goes on meanwhile."""
        if self._sealer is None:
            raise RefusedError("profile asked encrypted", "this device has no key for it: nothing was sent")
        return self._sealer.seal(request, self._declared())

    def _declared(self) -> Profile:
        with self.lock:
            profile = self.device.profile()
            return profile if self._gate is None else self._gate.release_profile(profile, self.device.meter.span())


_ASSIGNMENT = {"assignment.quotas", "assignment.label_weights", "assignment.mass_per_slot"}
_FATES = {
    int(Fate.REFUSED): "refused.score",
    int(Fate.KEPT): "kept",
    int(Fate.REPLACED): "replaced",
    int(Fate.REFRESHED): "refreshed",
}


def _part(state: State, name: str) -> State:
    return {key.removeprefix(f"{name}."): array for key, array in state.items() if key.startswith(f"{name}.")}
