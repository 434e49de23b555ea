"""A custom aggregation, named in tests/config/hashes_v1.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedkeep.core.aggregation import Aggregator
from fedkeep.core.types import Report, Vector


@dataclass(frozen=True)
class Kept(Aggregator):
    """The model stays as it is."""

    speed: float = 0.5

    def aggregate(self, model: Vector, reports: Sequence[Report]) -> Vector:
        """Return the model."""
        return model
