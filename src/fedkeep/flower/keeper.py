"""The Keeper: what an existing ClientApp needs to train on kept samples instead of all of them.

A Keeper alone keeps the best samples of its own stream. What the strategy's wrapper `Keeping` sends with each
model is the direction in which the fleet as a whole would move.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message

from fedkeep.config import build
from fedkeep.core.device import Device, DeviceOptions
from fedkeep.core.orders import screen_order
from fedkeep.core.ports import Learner
from fedkeep.core.regions import LabelRegions
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.types import AnyArray, Assignment, Batch, IntArray, LocalTraining, State, TrainOrder, Vector
from fedkeep.core.velocity import VelocityMeter
from fedkeep.flower.device_memory import ContextMemory, DeviceMemory, FileMemory
from fedkeep.presets import DEFAULT, device_tables
from fedkeep.registry import find_policy

DIRECTION, KEEPER, ESTIMATE = "fedkeep.direction", "fedkeep.keeper", "fedkeep.estimate"
_NO_TRAINING = LocalTraining(learning_rate=1.0, epochs=1)


class Keeper:
    """Values what it is offered, keeps the best, and remembers it all between two messages.

    Use it in a `with` block, which saves it at the end: offer what arrived, then sync with the model that came,
    then train on `samples()` and add `records()` to the reply.
    """

    def __init__(
        self,
        learner: Learner,
        memory: DeviceMemory,
        capacity: int,
        policy: str = "ode",
        preset: str = DEFAULT,
        seed: int = 0,
    ) -> None:
        self._learner, self._memory = learner, memory
        self._capacity, self._policy, self._preset, self._seed = capacity, policy, preset, seed
        self._estimate: Vector | None = None
        self._count = 0
        self._device: Device | None = None
        state = memory.load()
        if state:
            self._device = self._make(tuple(state["shape"].tolist()), int(state["labels"]))
            self._device.restore({n.removeprefix("device/"): a for n, a in state.items() if n.startswith("device/")})
        self._form = {name: state[name] for name in ("shape", "labels", "seen") if name in state}

    @classmethod
    def open(
        cls,
        context: Context,
        module: Callable[[], Any],
        capacity: int,
        *,
        policy: str = "ode",
        preset: str = DEFAULT,
        last_layers: int | None = None,
        directory: str | None = None,
    ) -> Keeper:
        """The keeper of this node, for the torch modules that `module` makes.

        `preset` sets the policy's options as in an experiment: `"paper"` is the paper's choice. In `directory` the
        keeper outlives restarts, else it lives in Flower's context.
        """
        from fedkeep.learn.torch_learner import TorchLearner

        memory = FileMemory(Path(directory) / f"keeper-{context.node_id}.npz") if directory else ContextMemory(context)
        return cls(TorchLearner(module, last_layers), memory, capacity, policy, preset, context.node_id % 2**62)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._device is not None:
            state: State = {f"device/{name}": array for name, array in self._device.snapshot().items()}
            self._memory.save(state | self._form)

    def offer(self, x: Any, y: Any) -> None:
        """Values a batch of arrivals, numpy or torch, under the model last synced; a sample seen before is known."""
        samples, labels = np.asarray(x, dtype=np.float32), np.asarray(y, dtype=np.int64)
        if self._device is None:
            self._begin(samples)
        assert self._device is not None
        self._divide(self._device, labels)
        self._device.observe(Batch(samples, labels, _ids(samples, labels)), time=0.0)

    def sync(self, model: Message | ArrayRecord | Vector, direction: Vector | None = None) -> None:
        """Takes the model that came, and the direction beside it in a message, and values what is kept anew."""
        order = self._order(model, direction)
        screen_order(order, self._learner.size, self._learner.gradient_size, 0, self._capacity)
        if self._device is not None:
            report = self._device.complete(self._device.prepare(order), order.model)
            self._estimate, self._count = report.local_gradient, report.gradient_samples

    def samples(self) -> list[tuple[AnyArray, int]]:
        """The kept samples with their labels, oldest first."""
        if self._device is None:
            return []
        kept = self._device.store.stored().batch
        return list(zip(kept.x, kept.y.tolist(), strict=True))

    def records(self) -> dict[str, ArrayRecord | ConfigRecord]:
        """What the reply tells `Keeping`: the mean gradient of what arrived, and how much that was."""
        if self._estimate is None:
            return {}
        return {
            ESTIMATE: ArrayRecord({"local_gradient": Array(self._estimate)}),
            KEEPER: ConfigRecord({"samples": self._count}),
        }

    def _begin(self, samples: AnyArray) -> None:
        labels = self._learner.logits(self._learner.initial(0), samples[:1]).shape[1]
        self._form = {
            "shape": np.array(samples.shape[1:], dtype=np.int64),
            "labels": np.array(labels),
            "seen": np.zeros(labels, dtype=bool),
        }
        self._device = self._make(samples.shape[1:], labels)

    def _make(self, shape: tuple[int, ...], labels: int) -> Device:
        said = device_tables(self._preset, self._policy)
        return Device(
            learner=self._learner,
            policy=build(find_policy(self._policy), said["policy"], "policy"),
            store=MemoryStore(np.zeros(labels, dtype=np.int64), AfterUse(**said["after_use"])),
            regions=LabelRegions(labels),
            meter=VelocityMeter(labels),
            capacity=self._capacity,
            sample_shape=shape,
            labels=labels,
            options=DeviceOptions(**said["device"]),
            seed=self._seed,
        )

    def _divide(self, device: Device, labels: IntArray) -> None:
        """Slots are divided evenly among the labels seen so far; dividing labels among devices takes a server."""
        known = int(self._form["labels"])
        seen = self._form["seen"] | np.isin(np.arange(known), labels)
        if (seen != self._form["seen"]).any():
            share, rest = divmod(self._capacity, int(seen.sum()))
            quotas = np.where(seen, share + (np.cumsum(seen) <= rest), 0)
            device.assign(Assignment(quotas, np.ones(known), 1.0))
            self._form["seen"] = seen

    def _order(self, model: Message | ArrayRecord | Vector, direction: Vector | None) -> TrainOrder:
        round_, accepted = 0, None
        if isinstance(model, Message):
            content = model.content
            if DIRECTION in content.array_records:
                direction = content.array_records[DIRECTION]["direction"].numpy()
            if KEEPER in content.config_records:
                said = content.config_records[KEEPER]
                round_, accepted = int(str(said["round"])), int(str(said["accepted"]))
            model = next(record for name, record in content.array_records.items() if name != DIRECTION)
        if isinstance(model, ArrayRecord):
            model = np.concatenate([array.numpy().ravel() for array in model.values()]).astype(np.float32)
        return TrainOrder(round_, model, direction, _NO_TRAINING, accepted)


def _ids(x: AnyArray, y: IntArray) -> IntArray:
    """What a sample is known by: its content."""
    pairs = zip(x, y.tolist(), strict=True)
    digests = [blake2b(sample.tobytes() + str(label).encode(), digest_size=8).digest() for sample, label in pairs]
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64) >> 1
