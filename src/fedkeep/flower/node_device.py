"""The device behind a node: what a ClientApp asks of it, and one that needs no agent."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol, TypeAlias

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.types import Batch, Profile, Report, State, TrainOrder, Vector
from fedkeep.flower.codec import Evaluation
from fedkeep.flower.device_memory import DeviceMemory

Arrivals: TypeAlias = Callable[[int, int], Batch]
"""What arrives from one round up to, not including, another."""


class NodeDevice(Protocol):
    """A device as a ClientApp sees it: in this process, or at the other end of an agent's socket."""

    def profile(self) -> Profile: ...

    def participate(self, order: TrainOrder) -> Report: ...

    def evaluate(self, model: Vector) -> Evaluation: ...


class CatchUpDevice:
    """A device without an agent: woken for a message, it catches up on its stream exactly as in the simulator.

    Flower starts a new process for every message, so all that it knows lies in `memory` between two of them. An
    order that comes twice, because the server was killed before it had saved the round, gets the same answer.
    """

    def __init__(self, device: Device, arrivals: Arrivals, test: Batch, memory: DeviceMemory) -> None:
        self._device, self._arrivals, self._test, self._memory = device, arrivals, test, memory
        self._seen = 0
        self._last: State = {}
        state = memory.load()
        if state:
            device.restore(_under("device/", state))
            self._seen = int(state["seen"])
            self._last = _under("last/", state)

    def profile(self) -> Profile:
        return self._device.profile()

    def participate(self, order: TrainOrder) -> Report:
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

    def _save(self) -> None:
        state: State = {f"device/{name}": array for name, array in self._device.snapshot().items()}
        state |= {f"last/{name}": array for name, array in self._last.items()}
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
