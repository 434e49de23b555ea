"""Components by name: what may stand in `name = "..."` of a configuration table."""

from typing import Any

import fedkeep.config.method_components
from fedkeep.core.aggregation import AGGREGATORS
from fedkeep.core.planning.greedy import COORDINATORS
from fedkeep.core.policy import POLICIES
from fedkeep.core.registry import Registry
from fedkeep.data import PARTITIONS, TASKS

assert fedkeep.config.method_components  # importing it registers the policies

COMPONENTS: dict[str, Registry[Any]] = {
    "policy": POLICIES,
    "task": TASKS,
    "coordinator": COORDINATORS,
    "aggregation": AGGREGATORS,
    "partition": PARTITIONS,
}
"""By the table of an experiment that they stand in."""
