"""How a round's local models become the global model (Eq. 2, step 8): one class a rule.

A custom rule is a subclass of `Aggregator` with one overridden method, `aggregate`; a configuration
names it by `module:Class`.
"""

from fedkeep.core.aggregation.base import (
    AGGREGATORS,
    Aggregator,
    MergedReports,
    UpdateSum,
    aggregation,
)
from fedkeep.core.aggregation.fedavg import FedAvg
from fedkeep.core.aggregation.fednova import FedNova
from fedkeep.core.aggregation.median import Median
from fedkeep.core.aggregation.norm_bounded import NormBounded
from fedkeep.core.aggregation.robust.mean import RobustMean
from fedkeep.core.aggregation.trimmed import Trimmed

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "FedAvg",
    "FedNova",
    "Median",
    "MergedReports",
    "NormBounded",
    "RobustMean",
    "Trimmed",
    "UpdateSum",
    "aggregation",
]
