"""A device without an agent: it replays its part of a task's stream whenever it is woken."""

from collections.abc import Callable
from dataclasses import astuple
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.state import add_prefix, restore_parts, snapshot_parts, strip_prefix
from fedkeep.core.types import Batch, Profile, Report, TrainOrder, Vector
from fedkeep.flower.device_memory import DeviceMemory
from fedkeep.learn.evaluation import judge
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.release import ReleasePipeline
from fedkeep.protocol.messages import (
    DeviceReply,
    DeviceRequest,
    DeviceStats,
    Evaluated,
    ProfileRequest,
    Reported,
    reply_of,
)
from fedkeep.protocol.wire import from_bytes, to_bytes

if TYPE_CHECKING:
    from fedkeep.privacy.gaussian import NormalSource

_WINDOW = 1.0
"""The rounds over which a device that replays a stream is taken to have counted its velocities."""


class CatchUpDevice:
    """A device without an agent, which catches up on its stream when a message wakes it.

    Flower starts a new process for every message, so the device's whole state, its privacy ledger
    included, lies in `memory` between two of them. It catches up exactly as in the simulator. An
    order that comes twice, because the server was killed before it had saved the round, gets the
    same answer, with the same noise and without a new charge. `arrivals(a, b)` is what came from
    round a up to, not including, round b.
    """

    def __init__(
        self,
        device: Device,
        arrivals: Callable[[int, int], Batch],
        test: Batch,
        memory: DeviceMemory,
        privacy: PrivacyOptions | None = None,
        noise: "NormalSource | None" = None,
    ) -> None:
        self._device, self._arrivals, self._test, self._memory = device, arrivals, test, memory
        self._private = privacy is not None and privacy.epsilon is not None
        if self._private and not memory.durable:
            raise ConfigError(
                "a privacy budget needs a ledger that outlives the SuperNode: "
                "give the node a state-dir"
            )
        self._release = ReleasePipeline()
        if privacy is not None:
            if privacy.protects("estimator") and privacy.unit == "sample":
                device.exchange.check_sample_privacy()
            self._release = ReleasePipeline(
                privacy, device.learner.gradient_size, self._save, normal=noise
            )
        self._kept = self._release.kept(under_way=True)
        try:
            state = memory.load()
        except DataError as error:
            lost = (
                ", and with a new privacy budget, for the ledger was lost with it"
                if self._private
                else ""
            )
            raise DataError(f"{error}{lost}") from error
        self._last, self._seen = strip_prefix("last", state), int(state.get("seen", 0))
        if state:
            device.restore(strip_prefix("device", state))
        restore_parts(
            {name: part for name, part in self._kept.items() if strip_prefix(name, state)}, state
        )

    def reply(self, request: DeviceRequest) -> DeviceReply:
        return reply_of(self, self.evaluate, request)

    def profile(self) -> Profile:
        """What the device declares in the clear, if it may; a noisy profile is drawn once."""
        profile = self._release.profile(self._declared)
        self._save_if_private()
        return profile

    def encrypted_profile(self, request: ProfileRequest) -> bytes:
        """What the device declares, for the key-holder it knows."""
        sealed = self._release.sealed_profile(request, self._declared)
        self._save_if_private()
        return sealed

    def participate(self, order: TrainOrder) -> Report:
        self._release.require_clear()
        return self._released(order)

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        agreed = self._release.terms(terms)
        return self._release.hold(self._released(order), order, agreed)

    def answer(self, question: bytes) -> bytes:
        answer = self._release.answer(question)
        self._save()
        return answer

    def evaluate(self, model: Vector) -> Evaluated:
        """The model on the device's test samples, or on what it has stored if it has none."""
        held_out, stored = len(self._test) > 0, self._device.store.stored().batch
        gist = tuple(self._last["gist"].tolist()) if "gist" in self._last else None
        vitals = self._release.vitals(
            DeviceStats(len(stored), tuple(np.bincount(stored.y).tolist()), gist=gist)
        )
        batch = self._test if held_out else stored
        if not len(batch):
            return Evaluated(0, 0.0, 0, vitals=vitals)
        losses, right = judge(self._device.learner, model, batch.x, batch.y)
        where = "held-out" if held_out else "stored"
        return Evaluated(len(batch), float(losses.sum()), int(right.sum()), where, vitals)

    def _released(self, order: TrainOrder) -> Report:
        """The report to an order as it may leave; the same one to an order that has come before."""
        self._device.screen(order)
        direction = b"" if order.direction is None else order.direction.tobytes()
        content = f"{order.round}/{order.local}/".encode() + order.model.tobytes() + direction
        digest = blake2b(content, digest_size=16).digest()
        if self._last and self._last["digest"].tobytes() == digest:
            answer: Report = from_bytes(self._last["report"].tobytes(), Reported).report
            return answer
        if self._seen == 0 and order.assignment is not None:
            self._device.apply_plan(order.assignment)
        now = order.round + 1
        batch = self._arrivals(self._seen, now)
        self._device.ingest(batch, now, self._device.measure(batch))
        self._seen = now
        report = self._device.participate(order)
        self._save_if_private()  # a device whose budget is spent has taken part all the same
        report = self._release.release(report, order)
        last = {"digest": digest, "report": to_bytes(Reported(report))}
        self._last = {name: np.frombuffer(raw, dtype=np.uint8) for name, raw in last.items()}
        if self._device.gist is not None and (did := self._device.gist.figures) is not None:
            self._last["gist"] = np.array(astuple(did))
        self._save()
        return report

    def _declared(self) -> tuple[Profile, float]:
        return self._device.profile(), _WINDOW

    def _save_if_private(self) -> None:
        """Saves what a budget pays for, so that it is repeated, not drawn again."""
        if self._private:
            self._save()

    def _save(self) -> None:
        state = snapshot_parts({"device": self._device, **self._kept}) | add_prefix(
            "last", self._last
        )
        self._memory.save(state | {"seen": np.array(self._seen)})
