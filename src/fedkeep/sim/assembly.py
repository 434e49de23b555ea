"""Puts an experiment's components together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedkeep.config.device import build_device
from fedkeep.config.experiment import Experiment
from fedkeep.config.options import RegionOptions
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.gradients import Estimate
from fedkeep.core.planning.plan import Plan
from fedkeep.core.policies.full_data import FullData
from fedkeep.core.protocols import FleetLearner, GradientProbe
from fedkeep.core.regions import LabelRegions, Regions, TargetRegions
from fedkeep.core.seeds import child_seed, generator
from fedkeep.core.server import Server
from fedkeep.core.types import DeviceId, FloatArray, IntArray, Profile, Vector
from fedkeep.core.velocity import KnownVelocity, VelocityMeter
from fedkeep.data import Federation, Ownership, Progress, Stream, Task
from fedkeep.learn.losses import LOSS_KEYS
from fedkeep.learn.models import learner_for
from fedkeep.loading import load_object
from fedkeep.sim.baselines import Baseline, baseline_for
from fedkeep.sim.fleet import DeviceMechanisms, FullFleet, Oracle, SimulatedFleet


@dataclass(eq=False)
class SimulationContext:
    """What the devices of an experiment have in common; each is made from it without the others."""

    experiment: Experiment
    data: Federation
    stream: Stream
    learner: FleetLearner
    model: Vector
    """The first one."""
    regions: Regions
    velocities: FloatArray
    """V, (C, Y), in arrivals a round: as declared, unless devices measure it."""
    capacities: IntArray
    """B, (C,): how many samples each device can keep."""

    def stored_slots(self, number: DeviceId) -> int:
        """Give the slots of a device's store, beside those in which samples wait for labels."""
        capacity = int(self.capacities[number])
        return capacity - self.experiment.waiting.slots(capacity)

    def device(self, number: DeviceId, direction: Vector | None = None) -> Device:
        """Make a device as it is before it hears of a plan: with the first model."""
        experiment, profile, known = (
            self.experiment,
            self.experiment.profile,
            self.velocities[number],
        )
        made = build_device(
            experiment,
            self.learner,
            capacity=int(self.capacities[number]),
            sample_shape=self.data.sample_shape,
            labels=self.data.labels,
            targets=self.data.targets,
            regions=self.regions,
            meter=VelocityMeter(self.regions.count, profile.window)
            if profile.measured
            else KnownVelocity(known),
            seed=child_seed(experiment.seed, "device", number),
        )
        made.set_model(self.model, direction)
        return made


@dataclass(eq=False, kw_only=True)
class Assembly(SimulationContext):
    """A simulation's parts."""

    server: Server
    fleet: SimulatedFleet | FullFleet
    oracle: Oracle | None
    """Present if every device is to have the exact gradient in every round."""
    mechanisms: DeviceMechanisms
    """What the devices' reports pass on their way out."""
    baseline: Baseline
    """What else is done about small and unlike stores; nothing, unless `correction` says so."""


def simulation_context(experiment: Experiment, data: Federation | None = None) -> SimulationContext:
    """Build what is common to the devices, the data loaded unless given.

    >>> from fedkeep.config.experiment import resolve
    >>> demo = {"task": {"name": "demo", "devices": 3}, "storage": {"capacity": 4}}
    >>> context = simulation_context(resolve(demo))
    >>> device = context.device(0)
    >>> outcome, refused = device.observe(context.stream.arrivals(0, 0, 20), time=20.0)
    >>> len(device.store.stored().batch)
    4
    """
    if data is None:
        data = load_data(experiment.task, experiment.seed)
    capacities = experiment.storage.capacities(data.devices, experiment.seed)
    if experiment.names["policy"] == "central":  # on one device
        capacities = capacities[:1]
        train, test = (
            Ownership(own.indices, np.array([len(own.indices)])) for own in (data.train, data.test)
        )
        data = replace(data, train=train, test=test, device_names=None)
    stream = Stream(data, experiment.stream, experiment.seed)
    learner = build_learner(experiment, data)
    model = learner.initial(experiment.model_seed)
    regions, counts = divide(experiment, data, learner.probe(model))
    velocities = declared_velocities(counts, stream.rates, experiment)
    return SimulationContext(
        experiment, data, stream, learner, model, regions, velocities, capacities
    )


def declared_velocities(counts: IntArray, rates: FloatArray, experiment: Experiment) -> FloatArray:
    """Give V as devices declare it before a run: what the data set will bring, and an error.

    Parameters
    ----------
    counts : ndarray of int, shape (C, Y)
        Training samples per device and region.
    rates : ndarray of float, shape (C,)
        Arrivals a round.
    experiment : Experiment
        Has the size of the error and the seed that it is drawn from.

    Returns
    -------
    ndarray of float, shape (C, Y)
        Arrivals a round, 0 or more.

    References
    ----------
    ODE's journal version (ToN 2024), Fig. 16: errors from N(0, (sigma V)^2).
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    velocities: FloatArray = shares * rates[:, None]
    error = experiment.profile.velocity_error
    if error:
        noise = generator(experiment.seed, "velocity").standard_normal(velocities.shape)
        velocities = np.maximum(velocities * (1 + error * noise), 0.0)
    return velocities


def assemble(experiment: Experiment, data: Federation | None = None) -> Assembly:
    """Build the parts of the experiment, its data loaded unless given.

    >>> from fedkeep.config.experiment import resolve
    >>> demo = {"task": {"name": "demo", "devices": 3}, "policy": {"name": "fifo"}}
    >>> parts = assemble(resolve(demo))
    >>> parts.data.devices, parts.learner.size, len(parts.server.model)
    (3, 310, 310)
    """
    context = simulation_context(experiment, data)
    data, stream, learner, policy = context.data, context.stream, context.learner, experiment.policy
    server = experiment.make_server(learner, context.model, context.regions.count)
    mechanisms = DeviceMechanisms(experiment)
    if not experiment.profile.measured:
        profiles = {
            d: Profile(context.stored_slots(d), context.velocities[d]) for d in range(data.devices)
        }
        coordinate(experiment, server, mechanisms.release_profiles(profiles))
    oracle = Oracle(learner, data, experiment.estimator.exact_samples, experiment.seed)
    if policy.uses_global_gradient and experiment.estimator.cold_start == "exact":
        # As if every device had reported before the first round.
        exact = {d: oracle.gradient(context.model, data.train.of(d)) for d in range(data.devices)}
        server.warm_start({d: Estimate(g, float(stream.rates[d]), -1) for d, g in exact.items()})
    if policy.unbounded:
        so_far = isinstance(policy, FullData) and policy.so_far
        fleet: SimulatedFleet | FullFleet = FullFleet(
            learner,
            stream,
            experiment.exchange,
            experiment.gist.drift_weight,
            experiment.seed,
            so_far=so_far,
        )
    else:
        direction = server.estimator.global_gradient()

        def make(number: DeviceId) -> Device:
            """As it is before the first round: with the plan's word on what to keep."""
            made = context.device(number, direction)
            if server.plan is not None:
                made.apply_plan(server.plan.assignment(number))
            return made

        fleet = SimulatedFleet(learner, stream, make)
    return Assembly(
        **vars(context),
        server=server,
        fleet=fleet,
        oracle=oracle
        if policy.uses_global_gradient and experiment.estimator.name == "exact"
        else None,
        mechanisms=mechanisms,
        baseline=baseline_for(experiment.correction, learner, stream.rates),
    )


def coordinate(
    experiment: Experiment, server: Server, profiles: Mapping[DeviceId, Profile]
) -> Plan:
    """Have a plan made from what the devices declare, in the clear or ranked under encryption.

    Parameters
    ----------
    experiment : Experiment
        Says how profiles are protected.
    server : Server
        Follows the plan; of ranked profiles it learns the plan alone.
    profiles : mapping of DeviceId to Profile
        Of all devices.

    Returns
    -------
    Plan
        As the devices are told.
    """
    if experiment.privacy.profile_protection == "homomorphic":
        from fedkeep.keyholder.ranking import FINE, plan_ranked

        plan = plan_ranked(profiles, experiment.coordinator, FINE)
        server.use_plan(plan)
        return plan
    plan, _ = server.coordinate(profiles)
    return plan


def load_data(task: Task, seed: int, progress: Progress | None = None) -> Federation:
    """Load the task's data; the latest is kept, as the methods of a sweep run on the same."""
    # A task itself may hold tables, which cannot be looked up.
    key = (repr(task), seed)
    if key not in _latest:
        _latest.clear()
        _latest[key] = task.load(seed, progress)
    return _latest[key]


_latest: dict[tuple[str, int], Federation] = {}


def build_learner(experiment: Experiment, data: Federation) -> FleetLearner:
    """Build the task's model, the one the experiment names, or a user-defined learner."""
    overrides = dict(experiment.model)
    name = overrides.pop("name", data.model.name)
    given = dict(data.model.options)
    if ":" in str(overrides.get("loss", "")):  # it has its numbers in its function
        given = {key: value for key, value in given.items() if key not in LOSS_KEYS}
    if name != data.model.name:  # the loss is the data's, whatever the model
        given = {key: value for key, value in given.items() if key in LOSS_KEYS}
    options = given | overrides
    own = load_object(name) if ":" in name else None
    if not isinstance(own, type) or not hasattr(own, "train_many"):
        return learner_for(name, data.sample_shape, data.labels, data.targets, **options)
    try:
        learner: FleetLearner = own(data.sample_shape, data.labels, **options)
    except TypeError as error:
        raise ConfigError(
            f"the learner {name} takes (sample_shape, classes) and its options: {error}"
        ) from error
    return learner


def divide(
    experiment: Experiment, data: Federation, probe: GradientProbe
) -> tuple[Regions, IntArray]:
    """Choose the regions: one where nobody divides slots, else by label, or user-defined.

    Those may have an `agree(data, probe, seed)`, which gives the regions that suit the data. With
    them comes what a device knows from the past of its own stream: training samples per device and
    region, (C, Y).
    """
    if experiment.names["coordinator"] == "none" and not experiment.policy.balanced:
        return LabelRegions(1), data.train.sizes[:, None]
    own: Any = experiment.regions
    if isinstance(own, RegionOptions):
        targets = data.targets
        divided = LabelRegions(data.labels) if targets is None else TargetRegions(targets)
        return divided, data.label_counts
    regions: Regions = own.agree(data, probe, experiment.seed) if hasattr(own, "agree") else own
    batches = [data.train_batch(d) for d in range(data.devices)]
    rows = [
        np.bincount(regions.assign(b, probe.measure(b)), minlength=regions.count) for b in batches
    ]
    return regions, np.stack(rows).astype(np.int64)
