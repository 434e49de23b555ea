"""The doors of simulated devices; their ledgers are part of the simulation's state."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.seeds import generator
from fedkeep.core.state import put_numbered, take_numbered
from fedkeep.core.types import DeviceId, FloatArray, Profile, Report, State, TrainOrder
from fedkeep.privacy.door import Door
from fedkeep.privacy.guard import Spending
from fedkeep.privacy.ledger import BudgetSpentError
from fedkeep.privacy.options import PrivacyOptions, refuse_conflicts
from fedkeep.sim.experiment import Experiment

_WINDOW = 1.0
"""The rounds over which a simulated device is taken to have counted the velocities it declares."""


class SeededNoise:
    """Normal numbers that depend on the seed, the device and the round alone: simulations repeat."""

    def __init__(self, seed: int, device: DeviceId) -> None:
        self._seed, self._device = seed, device
        self._generator = np.random.default_rng(0)

    def begin(self, round_: int) -> None:
        self._generator = generator(self._seed, "privacy", self._device, round_)

    def __call__(self, size: int) -> FloatArray:
        return self._generator.standard_normal(size)


class Guards:
    """Makes a door for each device that has something to send."""

    def __init__(self, options: PrivacyOptions, seed: int) -> None:
        self._options, self._seed = replace(options, secure_sum=False, encrypted_profiles=False), seed
        self._doors: dict[DeviceId, tuple[Door, SeededNoise]] = {}

    def release(
        self, orders: Mapping[DeviceId, TrainOrder], reports: Mapping[DeviceId, Report]
    ) -> dict[DeviceId, Report]:
        """What leaves the devices; those whose budget is spent may send nothing at all."""
        if self._options.epsilon is None:
            return dict(reports)
        sent = {}
        for device, report in reports.items():
            try:
                sent[device] = self._door(device, report.round).release(report, orders[device])
            except BudgetSpentError:
                continue
        return sent

    def release_profiles(self, profiles: Mapping[DeviceId, Profile]) -> dict[DeviceId, Profile]:
        """What the devices declare before the first round."""
        if not self._options.protects("profile"):
            return dict(profiles)
        return {d: self._door(d, -1).profile(partial(_counted, profile)) for d, profile in profiles.items()}

    def most_spent(self) -> Spending | None:
        """The ledger of the device that has told most; None where nothing is accounted for."""
        spendings = [spent for door, _ in self._doors.values() if (spent := door.spending()) is not None]
        return max(spendings, key=lambda s: s.spent, default=None)

    def snapshot(self) -> State:
        return put_numbered({d: door.kept(under_way=False)["gate"].snapshot() for d, (door, _) in self._doors.items()})

    def restore(self, state: State) -> None:
        self._doors = {}
        for device, own in take_numbered(state).items():
            self._door(device, -1).kept(under_way=False)["gate"].restore(own)

    def _door(self, device: DeviceId, round_: int) -> Door:
        if device not in self._doors:
            noise = SeededNoise(self._seed, device)
            self._doors[device] = Door(self._options, 0, lambda: None, normal=noise), noise
        door, noise = self._doors[device]
        noise.begin(round_)
        return door


def _counted(profile: Profile) -> tuple[Profile, float]:
    return profile, _WINDOW


def guards_for(experiment: Experiment) -> Guards:
    """The guards of an experiment; options under which its guarantee would not hold are refused."""
    options, estimator = experiment.privacy, experiment.estimator
    refuse_conflicts(options, experiment.aggregation)
    if options.protects("estimator") and "exact" in (estimator.name, estimator.cold_start):
        raise ConfigError("estimator 'exact' shows the server gradients without noise: not with privacy.epsilon")
    if options.protects("estimator") and options.unit == "sample" and estimator.name == "stored":
        raise ConfigError("estimator 'stored' sends a sample many times: use privacy.unit = 'device' with it")
    return Guards(options, experiment.seed)


def refuse_alone(experiment: Experiment) -> None:
    """Refuses what hides something only between machines."""
    options = experiment.privacy
    refuse_conflicts(options, experiment.aggregation)
    if options.secure_sum or options.encrypted_profiles:
        raise ConfigError("privacy.secure_sum and privacy.encrypted_profiles hide nothing in one process: deploy them")
