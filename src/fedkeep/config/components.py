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

assert fedkeep.core.policies  # importing them is what registers them

COMPONENTS: dict[str, Registry[Any]] = {
    "policy": POLICIES,
    "task": TASKS,
    "coordinator": COORDINATORS,
    "aggregation": AGGREGATORS,
    "partition": PARTITIONS,
}
"""By the table of an experiment that they stand in."""
REGIONS: Registry[type[Regions]] = Registry("division into regions", methods=("assign",))
"""Custom divisions; fedkeep's own goes by the table's `name`."""


def find_policy(name: str) -> type[SelectionPolicy]:
    """The policy of that name, or the class at `module:Class`."""
    return find_component(POLICIES, name)
