"""How a simulated fleet divides its distribution into regions."""

from __future__ import annotations

import numpy as np

from fedkeep.core.ports import Probe
from fedkeep.core.regions import LabelRegions, Regions, SingleRegion, positions
from fedkeep.core.seeds import generator
from fedkeep.core.types import IntArray
from fedkeep.data import Federation
from fedkeep.fleet.options import RegionOptions
from fedkeep.planning.clusters import Clusters
from fedkeep.sim.experiment import Experiment

_SUMMARISED = 200
"""Samples of a device, and devices of a fleet, that agreeing on clusters takes into account."""


def divide(experiment: Experiment, data: Federation, probe: Probe) -> Regions:
    """The regions of this experiment: one where nobody divides slots, else by label or by clusters agreed upon."""
    if experiment.names["coordinator"] == "none" and not experiment.policy.balanced:
        return SingleRegion()
    options = experiment.regions
    if not isinstance(options, RegionOptions):
        return options
    if options.name == "label":
        return LabelRegions(data.labels)
    clusters = Clusters(options.count, options.name, options.space, options.local, experiment.seed)
    rng = generator(experiment.seed, "clusters")
    devices = np.sort(rng.permutation(data.devices)[:_SUMMARISED]).tolist()
    batches = [data.take(data.train.of(d)[:_SUMMARISED]) for d in devices]
    return clusters.agree([clusters.summarise(positions(b, probe.measure(b), options.space)) for b in batches])


def region_counts(data: Federation, regions: Regions, probe: Probe) -> IntArray:
    """Training samples per device and region, (C, Y): what a device knows from the past of its own stream."""
    if isinstance(regions, SingleRegion):
        return data.train.sizes[:, None]
    if isinstance(regions, LabelRegions):
        return data.label_counts
    batches = [data.train_batch(d) for d in range(data.devices)]
    rows = [np.bincount(regions.assign(b, probe.measure(b)), minlength=regions.count) for b in batches]
    return np.stack(rows).astype(np.int64)
