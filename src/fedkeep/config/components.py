"""Components by name: what may stand in `name = "..."` of a configuration table."""

from typing import Any

import fedkeep.core.policies
from fedkeep.core.aggregation import AGGREGATORS
from fedkeep.core.planning.greedy import COORDINATORS
from fedkeep.core.policy import POLICIES, SelectionPolicy
from fedkeep.core.regions import Regions
from fedkeep.core.registry import Registry
from fedkeep.data import PARTITIONS, TASKS
from fedkeep.loading import find_component
from fedkeep.solvers import Hierarchical, KMeans

assert fedkeep.core.policies  # importing them is what registers them

COMPONENTS: dict[str, Registry[Any]] = {
    "policy": POLICIES,
    "task": TASKS,
    "coordinator": COORDINATORS,
    "aggregation": AGGREGATORS,
    "partition": PARTITIONS,
}
"""By the table of an experiment that they stand in."""
REGIONS: Registry[type[Regions]] = Registry(
    "division into regions",
    {"k-means": KMeans, "hierarchical": Hierarchical},
    methods=("assign",),
)
"""Beside `label`, which is the default."""


def find_policy(name: str) -> type[SelectionPolicy]:
    """The policy of that name, or the class at `module:Class`."""
    return find_component(POLICIES, name)
