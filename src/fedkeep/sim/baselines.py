"""Baselines from the literature: server momentum, FedVARP and SCAFFOLD, on any store.

They need what only a simulation has at no cost: a vector of every device, kept by the server or on
the device.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from fedkeep.config.options import CorrectionOptions
from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import Learner
from fedkeep.core.types import DeviceId, FloatArray, Report, State, Vector

Reports: TypeAlias = Mapping[DeviceId, Report]


class Baseline:
    """A correction of local steps, of the merged model, or of both; this one is FedAvg."""

    def __init__(self) -> None:
        self._kept: State = {}

    def corrections(self, devices: Sequence[DeviceId]) -> dict[DeviceId, Vector]:  # noqa: ARG002
        """Give what devices add to the gradient of their local steps, if anything."""
        return {}

    def step(self, before: Vector, after: Vector, reports: Reports, rate: float) -> Vector:  # noqa: ARG002
        """Give the model to go on with, where averaging led from `before` to `after`."""
        return after

    def snapshot(self) -> State:
        """Take the state as plain arrays."""
        return dict(self._kept)

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        self._kept = dict(state)


class ServerMomentum(Baseline):
    """FedAvgM (Hsu et al., 2019): v <- momentum v + update, w <- w + v."""

    def __init__(self, momentum: float = 0.9) -> None:
        self._momentum, self._kept = momentum, {"velocity": np.zeros(())}

    def step(self, before: Vector, after: Vector, reports: Reports, rate: float) -> Vector:  # noqa: ARG002
        """Give the model to go on with."""
        velocity = self._momentum * self._kept["velocity"] + (after.astype(np.float64) - before)
        self._kept["velocity"] = velocity
        return (before + velocity).astype(np.float32)


class _OfEachDevice(Baseline):
    """Keeps a vector of every device, zero until it is known, and their mean by rate."""

    def __init__(self, rates: FloatArray, size: int) -> None:
        self._share: FloatArray = rates / rates.sum()
        self._kept = {"mean": np.zeros(size)}

    def _of(self, device: DeviceId) -> Vector:
        return self._kept.get(str(device), np.zeros(len(self._kept["mean"]), dtype=np.float32))

    def _put(self, device: DeviceId, vector: FloatArray) -> None:
        new = vector.astype(np.float32)
        change = new.astype(np.float64) - self._of(device)
        self._kept |= {"mean": self._kept["mean"] + self._share[device] * change, str(device): new}


class FedVarp(_OfEachDevice):
    """FedVARP (Jhunjhunwala et al., 2022): absent devices count with their last update."""

    def step(self, before: Vector, after: Vector, reports: Reports, rate: float) -> Vector:  # noqa: ARG002
        """Give the model to go on with."""
        if not reports:
            return after
        total = sum(report.weight for report in reports.values())
        expected = sum(
            report.weight / total * self._of(d).astype(np.float64) for d, report in reports.items()
        )
        update = self._kept["mean"] + (after.astype(np.float64) - before) - expected
        for device, report in reports.items():
            self._put(device, report.model.astype(np.float64) - before)
        return (before + update).astype(np.float32)


class Scaffold(_OfEachDevice):
    """SCAFFOLD (Karimireddy et al., 2020), option II.

    c_i is the mean gradient of a device's last local steps.
    """

    def corrections(self, devices: Sequence[DeviceId]) -> dict[DeviceId, Vector]:
        """Give what each device adds to the gradient of its local steps."""
        return {
            device: (self._kept["mean"] - self._of(device)).astype(np.float32) for device in devices
        }

    def step(self, before: Vector, after: Vector, reports: Reports, rate: float) -> Vector:
        """Give the model to go on with."""
        mean = self._kept["mean"]
        for device, report in reports.items():
            gradient = (before.astype(np.float64) - report.model) / (report.steps * rate)
            self._put(device, self._of(device) - mean + gradient)
        return after


def baseline_for(options: CorrectionOptions, learner: Learner, rates: FloatArray) -> Baseline:
    """Make the baseline that the options name."""
    if options.name == "momentum":
        return ServerMomentum()
    if options.name == "fedvarp":
        return FedVarp(rates, learner.size)
    if options.name == "scaffold":
        if learner.gradient_size != learner.size:
            raise ConfigError(
                "correction 'scaffold' needs the whole model's gradient:"
                " leave out model.last_layers"
            )
        return Scaffold(rates, learner.size)
    return Baseline()
