"""`fleet.toml`: all that a server must know of a fleet, and no data."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fedkeep.config import Table, build
from fedkeep.core.errors import ConfigError
from fedkeep.core.names import did_you_mean
from fedkeep.core.ports import Learner
from fedkeep.core.regions import LabelRegions, Regions
from fedkeep.core.server import Server
from fedkeep.fleet.method import METHOD_KEYS, Method, method_parts, table_of, with_preset
from fedkeep.fleet.options import learner_of
from fedkeep.presets import DEFAULT

DEPLOYMENT_KEYS = ("rounds", "state", "keyholder", "records", "metrics")
"""Tables that say how a fleet is run, and not what it does; whoever runs it reads them."""
FLEET_KEYS = METHOD_KEYS | {"samples", *DEPLOYMENT_KEYS}


@dataclass(frozen=True)
class Samples:
    """`samples`: what every device's samples look like."""

    shape: tuple[int, ...]
    labels: int
    names: tuple[str, ...] = ()
    """Of the labels, for people; their numbers unless given."""

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape must be one or more positive numbers, got {list(self.shape)}")
        if self.labels < 2:
            raise ValueError(f"labels must be at least 2, got {self.labels}: fedkeep values samples of a classifier")
        if self.names and len(self.names) != self.labels:
            raise ValueError(f"names must be {self.labels}, one for each label, got {len(self.names)}")


@dataclass(frozen=True)
class FleetSpec(Method):
    """A fleet: its method, and the form of the samples its devices see.

    >>> spec = parse_fleet({"samples": {"shape": [30], "labels": 10}, "model": {"name": "softmax"}})
    >>> spec.server().round, spec.learner.size, spec.regions.count
    (0, 310, 10)
    """

    samples: Samples
    preset: str
    deployment: Mapping[str, Table]
    """The tables of `DEPLOYMENT_KEYS`, as they stand."""

    @cached_property
    def learner(self) -> Learner:
        return learner_of(self.model, self.samples.shape, self.samples.labels)

    @property
    def regions(self) -> Regions:
        """What the plan divides among the devices."""
        divided = self.policy.balanced or self.names["coordinator"] != "none"
        return LabelRegions(self.samples.labels if divided else 1)

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.samples.names or tuple(str(label) for label in range(self.samples.labels))

    def server(self) -> Server:
        """A server with its first model, before it knows any device."""
        learner = self.learner
        return self.make_server(learner, learner.initial(self.model_seed), self.regions.count)


def parse_fleet(table: Table) -> FleetSpec:
    """The specification in a table; a key that it does not know is named.

    >>> parse_fleet({"samples": {"shape": [30], "labels": 10}, "tran": {"rounds": 7}})
    Traceback (most recent call last):
    fedkeep.core.errors.ConfigError: unknown table 'tran': did you mean 'train'?
    """
    for key in table:
        if key not in FLEET_KEYS:
            raise ConfigError(f"unknown table '{key}': {did_you_mean(key, sorted(FLEET_KEYS))}")
    # A preset speaks of an experiment's data, too.
    method = method_parts({key: value for key, value in with_preset(table).items() if key in FLEET_KEYS})
    spec = FleetSpec(
        samples=build(Samples, table_of(table, "samples"), "samples"),
        preset=str(table.get("preset", DEFAULT)),
        deployment={key: dict(table_of(table, key)) for key in DEPLOYMENT_KEYS},
        **method,
    )
    if "exact" in (spec.estimator.name, spec.estimator.cold_start):
        raise ConfigError("estimator 'exact' needs all devices' data in one place: it is for `fedkeep run` only")
    if spec.policy.unbounded:
        raise ConfigError(f"policy '{spec.names['policy']}' keeps everything: it is for `fedkeep run` only")
    return spec
