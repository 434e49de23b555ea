"""Puts an experiment's components together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.factory import make_device
from fedkeep.core.policies.full_data import FullData
from fedkeep.core.ports import FleetLearner
from fedkeep.core.regions import Regions
from fedkeep.core.seeds import child_seed, generator
from fedkeep.core.server import Server
from fedkeep.core.types import DeviceId, FloatArray, IntArray, Profile, Vector
from fedkeep.core.velocity import KnownVelocity, Meter, MeterWindow, VelocityMeter
from fedkeep.data import Federation, Progress, Stream, Task
from fedkeep.learn.models import learner_for
from fedkeep.sim.division import divide, region_counts
from fedkeep.sim.experiment import Experiment
from fedkeep.sim.fleet import SimulatedFleet
from fedkeep.sim.guards import Guards, guards_for
from fedkeep.sim.oracle import Oracle
from fedkeep.sim.reference import FullFleet, pooled
from fedkeep.sim.rivals import Rival, rival_for


@dataclass(eq=False)
class Ground:
    """What the devices of an experiment have in common; each is made from it without the others."""

    experiment: Experiment
    data: Federation
    stream: Stream
    learner: FleetLearner
    model: Vector
    """The first one."""
    regions: Regions
    velocities: FloatArray
    """V as declared, (C, Y)."""

    def device(self, number: DeviceId, direction: Vector | None = None) -> Device:
        """A device as it is before it hears of a plan: with the first model."""
        experiment = self.experiment
        made = make_device(
            self.learner,
            experiment.policy,
            capacity=experiment.storage.capacity,
            sample_shape=self.data.sample_shape,
            labels=self.data.labels,
            regions=self.regions,
            meter=_meter(experiment, self.velocities[number]),
            after_use=experiment.storage.rule(),
            weighting=experiment.weights,
            options=experiment.storage.device(experiment.estimator),
            gist=experiment.gist,
            clip=experiment.privacy.clip if experiment.privacy.protects("estimator") else None,
            seed=child_seed(experiment.seed, "device", number),
        )
        made.install(self.model, direction)
        return made


@dataclass(eq=False)
class Assembly:
    """A simulation's parts."""

    data: Federation
    stream: Stream
    learner: FleetLearner
    server: Server
    regions: Regions
    velocities: FloatArray
    """V as declared, (C, Y); as it truly is where devices measure it."""
    fleet: SimulatedFleet | FullFleet
    oracle: Oracle | None
    """Present if every device is to have the exact gradient in every round."""
    guards: Guards
    """What the devices' reports pass on their way out."""
    rival: Rival
    """What else is done about small and unlike stores; nothing, unless `correction` says so."""


def lay_ground(experiment: Experiment, data: Federation | None = None) -> Ground:
    """What is common to the devices, the data loaded unless given."""
    if data is None:
        data = load_data(experiment.task, experiment.seed)
    if experiment.names["policy"] == "central":
        data = pooled(data)
    stream = Stream(data, experiment.stream, experiment.seed)
    learner = build_learner(experiment, data)
    model = learner.initial(experiment.model_seed)
    probe = learner.probe(model)
    regions = divide(experiment, data, probe)
    velocities = declared_velocities(experiment, region_counts(data, regions, probe), stream)
    return Ground(experiment, data, stream, learner, model, regions, velocities)


def assemble(experiment: Experiment, data: Federation | None = None) -> Assembly:
    """The parts of the experiment, its data loaded unless given."""
    ground = lay_ground(experiment, data)
    data, stream, learner = ground.data, ground.stream, ground.learner
    server = experiment.make_server(learner, ground.model, ground.regions.count)
    guards = guards_for(experiment)
    if not experiment.profile.measured:
        profiles = {d: Profile(experiment.storage.capacity, ground.velocities[d]) for d in range(data.devices)}
        server.coordinate(guards.release_profiles(profiles))
    oracle = Oracle(learner, data, experiment.estimator.exact_samples, experiment.seed)
    exact = experiment.policy.uses_direction and experiment.estimator.name == "exact"
    if experiment.policy.uses_direction and experiment.estimator.cold_start == "exact":
        rates = {d: stream.rate(d) for d in range(data.devices)}
        server.estimator.update(oracle.device_gradients(ground.model, rates))
    rival = rival_for(experiment.correction, learner, stream.rates)
    if experiment.policy.unbounded:
        so_far = isinstance(experiment.policy, FullData) and experiment.policy.so_far
        fleet: SimulatedFleet | FullFleet = FullFleet(learner, stream, experiment.gist, experiment.seed, so_far=so_far)
    else:
        fleet = SimulatedFleet(learner, stream, partial(_planned, ground, server, server.estimator.direction()))
    found = oracle if exact else None
    return Assembly(data, stream, learner, server, ground.regions, ground.velocities, fleet, found, guards, rival)


def _planned(ground: Ground, server: Server, direction: Vector | None, device: DeviceId) -> Device:
    """A device as it is before the first round: with the plan's word on what to keep."""
    made = ground.device(device, direction)
    if server.plan is not None:
        made.assign(server.plan.assignment(device))
    return made


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


def declared_velocities(experiment: Experiment, counts: IntArray, stream: Stream) -> FloatArray:
    """V as the devices declare it, (C, Y): arrivals a round, with the error that was asked for."""
    rates = np.array([stream.rate(d) for d in range(len(counts))])
    velocities: FloatArray = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) * rates[:, None]
    if experiment.profile.velocity_error:
        noise = generator(experiment.seed, "velocity").standard_normal(velocities.shape)
        velocities = np.maximum(velocities * (1 + experiment.profile.velocity_error * noise), 0.0)
    return velocities


def _meter(experiment: Experiment, known: FloatArray) -> Meter:
    options = experiment.profile
    return VelocityMeter(len(known), MeterWindow(options.window)) if options.measured else KnownVelocity(known)
