"""What valuing a sample costs a device: milliseconds, and megabytes above an idle process (Table 3)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.factory import make_device
from fedkeep.core.ports import FleetLearner
from fedkeep.core.regions import LabelRegions, Regions, SingleRegion
from fedkeep.core.types import Assignment, Batch
from fedkeep.core.velocity import KnownVelocity
from fedkeep.data import Federation
from fedkeep.sim.assembly import build_learner
from fedkeep.sim.experiment import Experiment

_WARM_UP = 20
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Cost:
    """The price of one method on one task."""

    one_ms: float
    """Milliseconds a sample, valued one at a time: the median."""
    batched_ms: float
    """Milliseconds a sample, valued all at once."""
    extra_mb: float
    """The process's peak while it values one at a time, above what it held with model and store in place."""


def measure_cost(experiment: Experiment, data: Federation, samples: Batch) -> Cost:
    """The cost of valuing `samples`; to be called in a process that has done nothing else.

    A loss needs no gradient, so `high-loss` is measured without one; arrival numbers and dice need no model at all.
    """
    if experiment.names["policy"] == "high-loss":
        experiment = replace(experiment, model={**experiment.model, "last_layers": 1})
    device = _device(experiment, data, build_learner(experiment, data))
    before = _resident("VmRSS")
    _RESET.write_text("5")
    one = [_seconds(device, samples.take(slice(i, i + 1)), i) for i in range(len(samples))]
    extra = _resident("VmHWM") - before
    fresh = Batch(samples.x, samples.y, samples.ids + len(samples))
    batched = _seconds(device, fresh, len(samples)) / len(samples)
    return Cost(1e3 * float(np.median(one[_WARM_UP:])), 1e3 * batched, extra)


def _device(experiment: Experiment, data: Federation, learner: FleetLearner) -> Device:
    """A device that has taken part once: with a model, a direction and its share of the plan."""
    coordinated = experiment.names["coordinator"] != "none"
    regions: Regions = LabelRegions(data.labels) if coordinated else SingleRegion()
    capacity = experiment.storage.capacity
    quotas = np.full(regions.count, max(1, capacity // regions.count), dtype=np.int64)
    device = make_device(
        learner,
        experiment.policy,
        capacity=capacity,
        sample_shape=data.sample_shape,
        labels=data.labels,
        regions=regions,
        meter=KnownVelocity(np.ones(regions.count)),
    )
    direction = np.random.default_rng(0).normal(size=learner.gradient_size).astype(np.float32)
    if experiment.names["policy"] not in {"fifo", "reservoir"}:
        device.install(learner.initial(0), direction if experiment.policy.uses_direction else None)
    device.assign(Assignment(quotas, np.ones(regions.count), 1.0))
    return device


def _seconds(device: Device, batch: Batch, now: float) -> float:
    return _timed(lambda: device.observe(batch, now))


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _resident(field: str) -> float:
    """A memory figure of this process, in megabytes, as Linux tells it."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024
