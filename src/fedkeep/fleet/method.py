"""A method: what devices keep and how a server merges, every choice made, and no data."""

from dataclasses import asdict, dataclass
from typing import Any

from fedkeep.config import Table, build, merged
from fedkeep.core.aggregation import Aggregation
from fedkeep.core.coordination import COORDINATORS, Coordinator, Uncoordinated
from fedkeep.core.errors import ConfigError
from fedkeep.core.estimators import GivenEstimator, global_estimator
from fedkeep.core.gist import GistOptions
from fedkeep.core.names import Registry
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.ports import Learner
from fedkeep.core.screening import Limits
from fedkeep.core.seeds import child_seed
from fedkeep.core.server import Server
from fedkeep.core.types import Vector
from fedkeep.core.weighting import UNCOORDINATED, Weighting
from fedkeep.fleet.options import EstimatorOptions, StorageOptions, TrainOptions
from fedkeep.loading import find_component
from fedkeep.presets import DEFAULT, DEFAULT_POLICY, experiment_tables
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.registry import AGGREGATIONS, REGIONS, find_policy

METHOD_TABLES: dict[str, type[Any]] = {
    "storage": StorageOptions,
    "weights": Weighting,
    "estimator": EstimatorOptions,
    "gist": GistOptions,
    "train": TrainOptions,
    "aggregation": Aggregation,
    "limits": Limits,
    "privacy": PrivacyOptions,
}
_OWN: dict[str, Registry[Any]] = {"aggregation": AGGREGATIONS, "regions": REGIONS}
"""Tables whose `name` may be a class of one's own."""
METHOD_KEYS = frozenset({"model", "policy", "coordinator", "seed", "preset", *METHOD_TABLES})


@dataclass(frozen=True)
class Method:
    """One way to run a fleet; an experiment adds data to it, a deployment's specification the form of its samples."""

    model: Table
    """`name`, `last_layers` and the factory's arguments."""
    policy: SelectionPolicy
    coordinator: Coordinator
    storage: StorageOptions
    weights: Weighting
    estimator: EstimatorOptions
    gist: GistOptions
    train: TrainOptions
    aggregation: Aggregation
    limits: Limits
    privacy: PrivacyOptions
    seed: int
    names: dict[str, str]
    """The registered names of policy and coordinator, and of whatever else was found by its name."""

    @property
    def model_seed(self) -> int:
        """Of the first model."""
        return child_seed(self.seed, "model")

    def described(self) -> Table:
        """Every option with its value, as plain data."""
        table: Table = {"seed": self.seed, "model": dict(self.model)}
        for key in ("policy", "coordinator"):
            table[key] = {"name": self.names[key], **asdict(getattr(self, key))}
        table |= {key: asdict(getattr(self, key)) for key in METHOD_TABLES}
        if "aggregation" in self.names:
            table["aggregation"]["name"] = self.names["aggregation"]
        return table

    def make_server(self, learner: Learner, model: Vector, regions: int) -> Server:
        """A server with this first model, before it knows any device; it is told of estimators, or of shared gists."""
        told = (self.policy.uses_direction or self.gist.shared) and self.estimator.name != "exact"
        return Server(
            model=model,
            gradient_size=learner.tail(self.gist.last_layers) if self.gist.shared else learner.gradient_size,
            regions=regions,
            schedule=self.train,
            coordinator=self.coordinator,
            estimator=global_estimator(self.estimator.name, self.estimator.max_age) if told else GivenEstimator(),
            aggregation=self.aggregation,
            limits=self.limits,
            seed=self.seed,
        )


def method_parts(table: Table) -> dict[str, Any]:
    """The fields of the method that a table, its preset's words included, describes; other keys are the caller's."""
    policy_name, options = named(table, "policy", default=DEFAULT_POLICY)
    policy = build(find_policy(policy_name), options, "policy")
    coordinator_name, coordinator = _coordinator(table, policy)
    plain, own = plain_parts(METHOD_TABLES, table)
    if not policy.coordinated and coordinator_name == "none":
        plain["weights"] = UNCOORDINATED
    gist, privacy = plain["gist"], plain["privacy"]
    if gist.shared and gist.last_layers is not None and policy.uses_direction:
        words = "would shorten the direction that the policy values by: set model.last_layers"
        raise ConfigError(f"gist.last_layers {words}")
    if gist.shared and privacy.protects("estimator") and privacy.unit == "sample":
        words = "tells of a sample in many rounds: set privacy.unit = 'device', or gist.name = 'local'"
        raise ConfigError(f"a shared gist {words}")
    seed = table.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"'seed' must be a whole number of at least 0, got {seed!r}")
    names = {"policy": policy_name, "coordinator": coordinator_name, **own}
    model = table_of(table, "model")
    return {"model": model, "policy": policy, "coordinator": coordinator, "seed": seed, "names": names, **plain}


def plain_parts(tables: dict[str, type[Any]], table: Table) -> tuple[dict[str, Any], dict[str, str]]:
    """The parts that tables of a fixed form describe, and the names of those that are classes of one's own."""
    own = {key: name for key in tables if key in _OWN and ":" in (name := str(table_of(table, key).get("name", "")))}
    parts = {key: build(cls, table_of(table, key), key) for key, cls in tables.items() if key not in own}
    for key, name in own.items():
        parts[key] = build(find_component(_OWN[key], name), named(table, key)[1], key)
    return parts, own


def with_preset(table: Table) -> Table:
    """The table over what its preset says of its policy."""
    remaining = {key: value for key, value in table.items() if key != "preset"}
    policy, _ = named(remaining, "policy", default=DEFAULT_POLICY)
    said = experiment_tables(str(table.get("preset", DEFAULT)), policy)
    if table_of(remaining, "privacy").get("secure_sum"):  # a robust mean must see single reports
        said = merged(said, {"aggregation": {"name": "fedavg"}})
    return merged(said, remaining)


def _coordinator(table: Table, policy: SelectionPolicy) -> tuple[str, Coordinator]:
    """The coordinator for this policy; a table speaks of coordinated policies, unless it says `applies_to = "all"`."""
    name, options = named(table, "coordinator", default="greedy")
    applies_to = options.pop("applies_to", "coordinated")
    if applies_to not in {"coordinated", "all"}:
        raise ConfigError(f"'coordinator.applies_to' cannot be {applies_to!r}: it is 'coordinated' or 'all'")
    if name == "none":
        return "none", Uncoordinated()  # limits that other methods of the file share do not matter to it
    coordinator = build(find_component(COORDINATORS, name), options, "coordinator")
    return (name, coordinator) if policy.coordinated or applies_to == "all" else ("none", Uncoordinated())


def named(table: Table, key: str, default: str | None = None) -> tuple[str, Table]:
    """The `name` in the table under a key, which must be there where there is no default, and the rest of it."""
    options = dict(table_of(table, key))
    name = options.pop("name", default)
    if not isinstance(name, str):
        raise ConfigError(f"'{key}.name' is missing" if name is None else f"'{key}.name' must be a string")
    return name, options


def table_of(table: Table, key: str) -> Table:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"'{key}' must be a table, got {found!r}")
    return found
