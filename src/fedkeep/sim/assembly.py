"""Puts an experiment's components together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.estimators import GivenEstimator, GlobalEstimator, global_estimator
from fedkeep.core.ports import FleetLearner
from fedkeep.core.regions import Regions
from fedkeep.core.seeds import child_seed, generator
from fedkeep.core.server import Server
from fedkeep.core.store import MemoryStore
from fedkeep.core.types import DeviceId, FloatArray, IntArray, Profile, Vector
from fedkeep.core.velocity import KnownVelocity
from fedkeep.data import Federation, Progress, Stream, Task
from fedkeep.learn.models import learner_for
from fedkeep.privacy.clipping import ClippedFleetLearner
from fedkeep.sim.division import divide, region_counts
from fedkeep.sim.experiment import Experiment
from fedkeep.sim.fleet import Fleet
from fedkeep.sim.guards import Guards, guards_for
from fedkeep.sim.oracle import Oracle
from fedkeep.sim.reference import FullFleet, pooled


@dataclass(eq=False)
class Assembly:
    """A simulation's parts."""

    data: Federation
    stream: Stream
    learner: FleetLearner
    server: Server
    regions: Regions
    velocities: FloatArray
    """V as declared, (C, Y)."""
    fleet: Fleet | FullFleet
    oracle: Oracle | None
    """Present if every device is to have the exact gradient in every round."""
    guards: Guards
    """What the devices' reports pass on their way out."""


def assemble(experiment: Experiment, data: Federation | None = None) -> Assembly:
    """The parts of the experiment, its data loaded unless given."""
    if data is None:
        data = load_data(experiment.task, experiment.seed)
    if experiment.names["policy"] == "central":
        data = pooled(data)
    stream = Stream(data, experiment.stream, experiment.seed)
    learner = build_learner(experiment, data)
    model = learner.initial(child_seed(experiment.seed, "model"))
    probe = learner.probe(model)
    regions = divide(experiment, data, probe)
    velocities = declared_velocities(experiment, region_counts(data, regions, probe), stream)
    server = _server(experiment, learner, model, regions.count)
    profiles = {d: Profile(experiment.storage.capacity, velocities[d]) for d in range(data.devices)}
    guards = guards_for(experiment)
    server.coordinate(guards.release_profiles(profiles))
    oracle = Oracle(learner, data, experiment.estimator.exact_samples, experiment.seed)
    exact = experiment.policy.uses_direction and experiment.estimator.name == "exact"
    if experiment.policy.uses_direction and experiment.estimator.cold_start == "exact":
        rates = {d: stream.rate(d) for d in range(data.devices)}
        server.estimator.update(oracle.device_gradients(model, rates))
    start = (model, server.estimator.direction())
    if experiment.policy.unbounded:
        fleet: Fleet | FullFleet = FullFleet(learner, stream, experiment.seed)
    else:
        own = _device_learner(experiment, learner)
        make = partial(_device, experiment, data, own, server, regions, velocities, start)
        fleet = Fleet(own, stream, make)
    return Assembly(data, stream, learner, server, regions, velocities, fleet, oracle if exact else None, guards)


def load_data(task: Task, seed: int, progress: Progress | None = None) -> Federation:
    """The task's data; the latest is kept, since the methods of a sweep run on the same."""
    return _loaded(_Wanted(repr(task), seed, task, progress))


@dataclass(frozen=True)
class _Wanted:
    """Data by what it depends on; a task itself may hold tables, which cannot be looked up."""

    described: str
    seed: int
    task: Task = field(compare=False)
    progress: Progress | None = field(compare=False)


@lru_cache(maxsize=1)
def _loaded(wanted: _Wanted) -> Federation:
    return wanted.task.load(wanted.seed, wanted.progress)


def build_learner(experiment: Experiment, data: Federation) -> FleetLearner:
    """The task's model, or the one the experiment names."""
    overrides: dict[str, Any] = dict(experiment.model)
    name = overrides.pop("name", data.model.name)
    last_layers = overrides.pop("last_layers", None)
    options = {**data.model.options, **overrides} if name == data.model.name else overrides
    return learner_for(name, data.sample_shape, data.labels, last_layers=last_layers, options=options)


def _device_learner(experiment: Experiment, learner: FleetLearner) -> FleetLearner:
    """The learner on the devices, which clips gradients where noise is to hide them."""
    options = experiment.privacy
    return ClippedFleetLearner(learner, options.clip) if options.protects("estimator") else learner


def declared_velocities(experiment: Experiment, counts: IntArray, stream: Stream) -> FloatArray:
    """V as the devices declare it, (C, Y): arrivals a round, with the error that was asked for."""
    rates = np.array([stream.rate(d) for d in range(len(counts))])
    velocities: FloatArray = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) * rates[:, None]
    if experiment.profile.velocity_error:
        noise = generator(experiment.seed, "velocity").standard_normal(velocities.shape)
        velocities = np.maximum(velocities * (1 + experiment.profile.velocity_error * noise), 0.0)
    return velocities


def _estimator(experiment: Experiment) -> GlobalEstimator:
    options = experiment.estimator
    if not experiment.policy.uses_direction or options.name == "exact":
        return GivenEstimator()
    return global_estimator(options.name, options.max_age)


def _server(experiment: Experiment, learner: FleetLearner, model: Vector, regions: int) -> Server:
    return Server(
        model=model,
        gradient_size=learner.gradient_size,
        regions=regions,
        schedule=experiment.train,
        coordinator=experiment.coordinator,
        estimator=_estimator(experiment),
        aggregation=experiment.aggregation,
        limits=experiment.limits,
        seed=experiment.seed,
    )


def _device(
    experiment: Experiment,
    data: Federation,
    learner: FleetLearner,
    server: Server,
    regions: Regions,
    velocities: FloatArray,
    start: tuple[Vector, Vector | None],
    device: DeviceId,
) -> Device:
    """A device as it is before the first round: with the first model, and the plan's word on what to keep."""
    made = Device(
        learner=learner,
        policy=experiment.policy,
        store=MemoryStore(np.zeros(regions.count, dtype=np.int64), experiment.storage.rule()),
        regions=regions,
        meter=KnownVelocity(velocities[device]),
        capacity=experiment.storage.capacity,
        sample_shape=data.sample_shape,
        labels=data.labels,
        weighting=experiment.weights,
        options=experiment.storage.device(experiment.estimator),
        seed=child_seed(experiment.seed, "device", device),
    )
    made.install(*start)
    if server.plan is not None:
        made.assign(server.plan.assignment(device))
    return made
