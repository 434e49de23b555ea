"""Components that a method names: policies, and divisions of samples into regions.

A device needs these alone: tasks and partitions, which bring data with them, are in `components`.
"""

import fedkeep.core.policies
from fedkeep.core.policy import POLICIES, SelectionPolicy
from fedkeep.core.regions import Regions
from fedkeep.core.registry import Registry
from fedkeep.loading import find_component
from fedkeep.solvers import Hierarchical, KMeans

assert fedkeep.core.policies  # importing them is what registers them

REGIONS: Registry[type[Regions]] = Registry(
    "division into regions",
    {"k-means": KMeans, "hierarchical": Hierarchical},
    methods=("assign",),
)
"""Beside `label`, which is the default."""


def find_policy(name: str) -> type[SelectionPolicy]:
    """Find the policy of that name, or the class at `module:Class`."""
    return find_component(POLICIES, name)
