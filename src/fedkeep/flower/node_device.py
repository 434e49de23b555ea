"""The device behind a node: what a ClientApp asks of it, and one that needs no agent."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError, DataError, RefusedError
from fedkeep.core.types import Batch, Profile, Report, State, TrainOrder, Vector
from fedkeep.flower.codec import Evaluation
from fedkeep.flower.device_memory import DeviceMemory

if TYPE_CHECKING:
    from fedkeep.privacy.encrypted import EncryptedProfile, ProfileRequest
    from fedkeep.privacy.gaussian import NormalSource
    from fedkeep.privacy.guard import Guard
    from fedkeep.privacy.options import PrivacyOptions

Arrivals: TypeAlias = Callable[[int, int], Batch]
"""What arrives from one round up to, not including, another."""
_WINDOW = 1.0
"""The rounds over which a device that replays a stream is taken to have counted its velocities."""


class NodeDevice(Protocol):
    """A device as a ClientApp sees it: in this process, or at the other end of an agent's socket."""

    def profile(self) -> Profile: ...

    def encrypted_profile(self, request: ProfileRequest) -> EncryptedProfile: ...

    def participate(self, order: TrainOrder) -> Report: ...

    def evaluate(self, model: Vector) -> Evaluation: ...


@runtime_checkable
class HidingDevice(NodeDevice, Protocol):
    """A device that can take part in secure sums."""

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        """Takes part, and keeps the report for masking; the answer is keys."""

    def answer(self, question: bytes) -> bytes:
        """The answer to a later exchange."""


class CatchUpDevice:
    """A device without an agent: woken for a message, it catches up on its stream exactly as in the simulator.

    Flower starts a new process for every message, so all that it knows lies in `memory` between two of them, its
    privacy ledger included. An order that comes twice, because the server was killed before it had saved the round,
    gets the same answer, with the same noise and without a new charge.
    """

    def __init__(
        self,
        device: Device,
        arrivals: Arrivals,
        test: Batch,
        memory: DeviceMemory,
        privacy: PrivacyOptions | None = None,
        noise: NormalSource | None = None,
    ) -> None:
        self._device, self._arrivals, self._test, self._memory = device, arrivals, test, memory
        self._privacy = privacy
        self._seen = 0
        self._last: State = {}
        self._guard = None if privacy is None or privacy.epsilon is None else self._make_guard(privacy, noise)
        state = self._load()
        if state:
            device.restore(_under("device/", state))
            self._seen = int(state["seen"])
            self._last = _under("last/", state)
        if self._guard is not None and (guarded := _under("guard/", state)):
            self._guard.restore(guarded)

    def profile(self) -> Profile:
        """What the device declares in the clear, if it may."""
        if self._privacy is not None and self._privacy.encrypted_profiles:
            raise RefusedError("profile asked in the clear", "this device encrypts its profile: nothing was sent")
        return self._declared()

    def encrypted_profile(self, request: ProfileRequest) -> EncryptedProfile:
        """What the device declares, for the key-holder it knows."""
        from fedkeep.privacy.sealing import ProfileSealer

        if self._privacy is None or not self._privacy.encrypted_profiles:
            raise RefusedError("profile asked encrypted", "this device has no key for it: nothing was sent")
        return ProfileSealer(self._privacy).seal(request, self._declared())

    def participate(self, order: TrainOrder) -> Report:
        self._device.screen(order)
        digest = _digest(order)
        if self._last and self._last["digest"].tobytes() == digest:
            return _report(self._last)
        if self._seen == 0 and order.assignment is not None:
            self._device.assign(order.assignment)
        now = order.round + 1
        batch = self._arrivals(self._seen, now)
        self._device.take_in(batch, now, self._device.measure(batch))
        self._seen = now
        report = self._device.participate(order)
        if self._guard is not None:
            self._save()  # a device whose budget is spent has taken part all the same
            report = self._guard.release(report, order)
        self._last = _arrays(report) | {"digest": np.frombuffer(digest, dtype=np.uint8)}
        self._save()
        return report

    def evaluate(self, model: Vector) -> Evaluation:
        """The model on the device's test samples, or on what it has stored if it has none."""
        batch = self._test if len(self._test) else self._device.store.stored().batch
        if not len(batch):
            return Evaluation(0, 0.0, 0)
        losses = self._device.learner.probe(model).measure(batch).losses()
        guesses = np.argmax(self._device.learner.logits(model, batch.x), axis=1)
        return Evaluation(len(batch), float(losses.sum()), int((guesses == batch.y).sum()))

    def _declared(self) -> Profile:
        """The profile, where noise hides it told once and then repeated."""
        profile = self._device.profile()
        if self._guard is None:
            return profile
        released = self._guard.release_profile(profile, _WINDOW)
        self._save()
        return released

    def _make_guard(self, privacy: PrivacyOptions, noise: NormalSource | None) -> Guard:
        """The guard, whose charges are saved before what they pay for is sent."""
        from fedkeep.privacy.gaussian import system_normal
        from fedkeep.privacy.guard import Guard
        from fedkeep.privacy.ledger import Ledger

        if not self._memory.durable:
            raise ConfigError("a privacy budget needs a ledger that outlives the SuperNode: give the node a state-dir")
        if (
            privacy.protects("estimator")
            and privacy.unit == "sample"
            and self._device.options.gradient_from == "stored"
        ):
            raise ConfigError("estimator 'stored' sends a sample many times: use privacy.unit = 'device' with it")
        return Guard(privacy, Ledger(), lambda _: self._save(), noise or system_normal)

    def _load(self) -> State:
        try:
            return self._memory.load()
        except DataError as error:
            if self._guard is None:
                raise
            raise DataError(f"{error}, and with a new privacy budget, for the ledger was lost with it") from error

    def _save(self) -> None:
        state: State = {f"device/{name}": array for name, array in self._device.snapshot().items()}
        state |= {f"last/{name}": array for name, array in self._last.items()}
        if self._guard is not None:
            state |= {f"guard/{name}": array for name, array in self._guard.snapshot().items()}
        self._memory.save(state | {"seen": np.array(self._seen)})


def _digest(order: TrainOrder) -> bytes:
    direction = b"" if order.direction is None else order.direction.tobytes()
    head = f"{order.round}/{order.local}/".encode()
    return blake2b(head + order.model.tobytes() + direction, digest_size=16).digest()


def _arrays(report: Report) -> State:
    counts = [report.round, report.steps, report.samples, report.gradient_samples]
    state: State = {"model": report.model, "weight": np.array(report.weight), "counts": np.array(counts)}
    return state if report.local_gradient is None else state | {"gradient": report.local_gradient}


def _report(state: State) -> Report:
    round_, steps, samples, gradient_samples = state["counts"].tolist()
    gradient = state.get("gradient")
    return Report(round_, state["model"], float(state["weight"]), steps, samples, gradient, gradient_samples)


def _under(prefix: str, state: State) -> State:
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
