"""The one place that puts a device together: for simulator, agent, Keeper, cost measurements and checks alike."""

import numpy as np

from fedkeep.core.device import Device, DeviceOptions
from fedkeep.core.gist import GistOptions
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.ports import Learner, Store
from fedkeep.core.regions import LabelRegions, Regions, SingleRegion
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.velocity import Meter, VelocityMeter
from fedkeep.core.weighting import UNCOORDINATED, Weighting


def make_device(
    learner: Learner,
    policy: SelectionPolicy,
    *,
    capacity: int,
    sample_shape: tuple[int, ...],
    labels: int,
    regions: Regions | None = None,
    store: Store | None = None,
    meter: Meter | None = None,
    after_use: AfterUse = AfterUse(),
    weighting: Weighting | None = None,
    options: DeviceOptions = DeviceOptions(),
    gist: GistOptions = GistOptions(),
    clip: float | None = None,
    seed: int = 0,
) -> Device:
    """A device that keeps `capacity` samples by the policy; what is not given is as the policy needs it.

    A store of one's own follows its own rule: `after_use` is for the one in memory.

    >>> from fedkeep.core.policies.fifo import Fifo
    >>> from fedkeep.core.types import Batch
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> device = make_device(DenseLearner((2, 3)), Fifo(), capacity=2, sample_shape=(2,), labels=3)
    >>> came = Batch(np.zeros((3, 2), dtype=np.float32), np.array([0, 2, 0]), np.array([7, 8, 9]))
    >>> _ = device.observe(came, time=0.0)
    >>> device.store.stored().batch.ids.tolist()
    [8, 9]
    """
    regions = regions if regions is not None else regions_for(policy, labels)
    return Device(
        learner=learner,
        policy=policy,
        store=store if store is not None else memory_store(regions, after_use, options),
        regions=regions,
        meter=meter if meter is not None else VelocityMeter(regions.count),
        capacity=capacity,
        sample_shape=sample_shape,
        labels=labels,
        weighting=weighting if weighting is not None else (Weighting() if policy.coordinated else UNCOORDINATED),
        options=options,
        gist=gist,
        clip=clip,
        seed=seed,
    )


def memory_store(regions: Regions, after_use: AfterUse, options: DeviceOptions) -> MemoryStore:
    """A store without a slot yet; the plan or the device gives it some."""
    return MemoryStore(np.zeros(regions.count, dtype=np.int64), after_use, bends=options.quotas == "targets")


def regions_for(policy: SelectionPolicy, labels: int) -> Regions:
    """Labels, where slots are divided among them, by a plan or by the device; else one region for everything."""
    return LabelRegions(labels) if policy.coordinated or policy.balanced else SingleRegion()
