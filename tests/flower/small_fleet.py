"""A small fleet in one process: real strategy and devices, Flower's own messages, no SuperLink."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from fedkeep_app.catch_up import CatchUpDevice
from flwr.app import Context, Message

from fedkeep.config.experiment import Experiment, resolve
from fedkeep.core.seeds import generator
from fedkeep.core.types import FloatArray, State
from fedkeep.flower.client_app import make_client_app
from fedkeep.flower.device_memory import DeviceMemory
from fedkeep.flower.rounds import RoundOptions
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.strategy import FedkeepStrategy
from fedkeep.keyholder.service import RemotePlanner
from fedkeep.privacy.secagg.server import SecureAggregationServer
from fedkeep.sim.assembly import Assembly, assemble
from fedkeep.sim.fleet import FullFleet, SimulatedFleet
from tests.flower.in_process import InProcessGrid, make_node

App = Callable[[Message, Context], Message]
DETERMINISTIC = RoundOptions(participation=0.5, deterministic=True)


class DictMemory(DeviceMemory):
    """Outlives a message, not the test."""

    durable = True

    def __init__(self) -> None:
        self._state: State = {}

    def load(self) -> State:
        return self._state

    def save(self, state: State) -> None:
        self._state = {name: np.array(array) for name, array in state.items()}


class SeededNoise:
    """The noise that the simulator draws for a device in the round that has begun."""

    def __init__(self, seed: int, device: int) -> None:
        self._seed, self._device = seed, device
        self.begin(-1)

    def begin(self, round_: int) -> None:
        self._generator = generator(self._seed, "privacy", self._device, round_)

    def __call__(self, size: int) -> FloatArray:
        return self._generator.standard_normal(size)


DEPLOYED = {"sum_threshold", "min_cohort", "members", "member_key", "public_key"}
"""Keys of `privacy` that devices of a real fleet read."""


@dataclass(eq=False)
class SmallFleet:
    """Devices and the means to make servers for them; servers come and go, devices stay."""

    devices: int = 6
    rounds: int = 4
    seed: int = 0
    policy: str = "ode"
    directory: Path | None = None
    """Where devices keep their files; None: in memory."""
    options: RoundOptions = DETERMINISTIC
    table: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def experiment(self) -> Experiment:
        task = {
            "name": "demo",
            "devices": self.devices,
            "smallest": 60,
            "largest": 120,
            "features": 8,
            "labels": 4,
        }
        train = {
            "rounds": self.rounds,
            "participation": self.options.participation,
            "learning_rate": 0.1,
            "epochs": 2,
        }
        stream = {"rounds_per_pass": 10}
        rest = {"policy": {"name": self.policy}, "storage": {"capacity": 6}, "seed": self.seed}
        privacy = dict(self.table.get("privacy", {}))
        deployed = {key: privacy.pop(key) for key in DEPLOYED & privacy.keys()}
        table = {**rest, **self.table, "privacy": privacy}
        experiment = resolve({"task": task, "train": train, "stream": stream, **table})
        # What only a deployment reads, an experiment rejects.
        return replace(experiment, privacy=replace(experiment.privacy, **deployed))

    @cached_property
    def noises(self) -> dict[int, SeededNoise]:
        """The simulator's noise, so that a deployment can be compared with it."""
        return {number: SeededNoise(self.seed, number) for number in range(self.devices)}

    @cached_property
    def apps(self) -> dict[int, App]:
        """The ClientApp of every device; replace one to make a device misbehave."""
        return {
            number: make_client_app(partial(self._open, number)) for number in range(self.devices)
        }

    def grid(self) -> InProcessGrid:
        return InProcessGrid(make_node(number, app, {}) for number, app in self.apps.items())

    def strategy(
        self,
        store: StateStore | None = None,
        options: RoundOptions | None = None,
        planner: RemotePlanner | None = None,
    ) -> FedkeepStrategy:
        """A new server; it knows nothing of an older one but what the store tells."""
        parts = assemble(self.experiment, self._parts.data)
        parts.server.discard_plan()
        privacy = self.experiment.privacy
        sums = (
            SecureAggregationServer(parts.server, privacy, parts.server.gradient_size)
            if privacy.secure_aggregation
            else None
        )
        return FedkeepStrategy(parts.server, options or self.options, store, sums, planner)

    def device(self, number: int) -> CatchUpDevice:
        """The device itself, where it lives on between messages."""
        return self._living[number]

    def restarted(self, number: int) -> CatchUpDevice:
        """The device as a new process would find it."""
        return self._device(assemble(self.experiment, self._parts.data).fleet, number)

    def accuracy(self, strategy: FedkeepStrategy) -> float:
        test = self._parts.data.pooled_test
        guesses = np.argmax(self._parts.learner.logits(strategy.server.model, test.x), axis=1)
        return float(np.mean(guesses == test.y))

    @cached_property
    def _parts(self) -> Assembly:
        return assemble(self.experiment)

    @cached_property
    def memories(self) -> dict[int, DeviceMemory]:
        if self.directory is None:
            return {number: DictMemory() for number in range(self.devices)}
        return {
            number: DeviceMemory(self.directory / f"{number}.npz") for number in range(self.devices)
        }

    @cached_property
    def _living(self) -> dict[int, CatchUpDevice]:
        fleet = assemble(self.experiment, self._parts.data).fleet
        return {number: self._device(fleet, number) for number in range(self.devices)}

    def _open(self, number: int, context: Context) -> CatchUpDevice:
        """The device: one that lives on, or, if it has a file, one as a new process finds it."""
        return self._living[number] if self.directory is None else self.restarted(number)

    def _device(self, fleet: SimulatedFleet | FullFleet, number: int) -> CatchUpDevice:
        assert isinstance(fleet, SimulatedFleet)
        arrivals = partial(self._parts.stream.arrivals, number)
        test = self._parts.data.test_batch(number)
        privacy, noise = self.experiment.privacy, self.noises[number]
        return CatchUpDevice(
            fleet.device(number), arrivals, test, self.memories[number], privacy, noise
        )
