"""The method: all that a fleet does, without its data; with the form of its samples, a fleet."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

from fedkeep.config.aliases import current
from fedkeep.config.method_components import REGIONS, find_policy
from fedkeep.config.options import (
    EstimatorOptions,
    RegionOptions,
    StorageOptions,
    TrainOptions,
    learner_of,
)
from fedkeep.config.presets import DEFAULT, DEFAULT_POLICY, experiment_tables
from fedkeep.core.aggregation import AGGREGATORS, Aggregator
from fedkeep.core.errors import ConfigError
from fedkeep.core.gist import GistOptions
from fedkeep.core.gradient_exchange import GradientExchange, GradientSource, gradient_exchange
from fedkeep.core.planning.greedy import COORDINATORS, Coordinator, Uncoordinated
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.protocols import Learner
from fedkeep.core.regions import LabelRegions, Regions, TargetRegions
from fedkeep.core.registry import Registry, did_you_mean
from fedkeep.core.rules.options import Rule, check_rules, conditions
from fedkeep.core.rules.options import described as described_rules
from fedkeep.core.screening import Limits
from fedkeep.core.seeds import child_seed
from fedkeep.core.server import Server
from fedkeep.core.targets import NumberTargets, targets_of
from fedkeep.core.types import Vector
from fedkeep.core.waiting import WaitingOptions
from fedkeep.core.weighting import UNCOORDINATED, Weighting
from fedkeep.loading import find_component
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.tables import Table, build, merged

DEVICE_TABLES: dict[str, type[Any]] = {
    "storage": StorageOptions,
    "weights": Weighting,
    "estimator": EstimatorOptions,
    "gist": GistOptions,
    "privacy": PrivacyOptions,
    "waiting": WaitingOptions,
}
"""The tables of `MethodConfig`, beside those of policy and aggregation."""
_SERVER_TABLES: dict[str, type[Any]] = {"train": TrainOptions, "limits": Limits}
METHOD_TABLES: dict[str, type[Any]] = {
    key: {**DEVICE_TABLES, **_SERVER_TABLES}[key]
    for key in ("storage", "weights", "estimator", "gist", "train", "limits", "privacy", "waiting")
}
"""The tables of a method, in the order in which they are written down."""
_OWN: dict[str, Registry[Any]] = {"regions": REGIONS}
"""Tables whose `name` may be a class of one's own."""
METHOD_KEYS = frozenset(
    {"model", "policy", "coordinator", "aggregation", "seed", "preset", "rule", *METHOD_TABLES}
)
_REGION_TABLES: dict[str, type[Any]] = {"regions": RegionOptions}
DEPLOYMENT_KEYS = ("rounds", "state", "keyholder", "records", "metrics")
"""Tables that say how a fleet is run, and not what it does; whoever runs it reads them."""
FLEET_KEYS = METHOD_KEYS | {"samples", "regions", *DEPLOYMENT_KEYS}
_DEVICE_KEYS: dict[str, frozenset[str]] = {
    "storage": frozenset(field.name for field in fields(StorageOptions)),
    "waiting": frozenset(field.name for field in fields(WaitingOptions)),
    "gist": frozenset({"drift_weight", "label_matching", "max_ess", "encoding"}),
    "privacy": frozenset(
        {
            "delta",
            "clip",
            "model_clip",
            "profile_bound",
            "planned_participations",
            "retransmissions",
            "members",
            "member_key",
            "public_key",
        }
    ),
}
"""Keys of a method that devices read and a server does not."""
_SIMULATED_KEYS: dict[str, frozenset[str]] = {
    "train": frozenset({"dropout"}),
    "estimator": frozenset({"exact_samples"}),
}
"""Keys of a method that only a simulation reads."""


@dataclass(frozen=True)
class MethodConfig:
    """What devices store, how it counts and what is exchanged: the same in all configurations.

    Experiments, fleets and agents contain it, with the same tables and keys; `parse_method` is the
    one place that reads them, and `config.device.build_device` makes a device of it.

    Raises
    ------
    ConfigError
        If two of its tables exclude each other.
    """

    policy: SelectionPolicy
    storage: StorageOptions
    weights: Weighting
    estimator: EstimatorOptions
    gist: GistOptions
    aggregation: Aggregator
    privacy: PrivacyOptions
    waiting: WaitingOptions
    names: dict[str, str]
    """The registered names of the policy, and of whatever else was found by its name."""
    rules: tuple[Rule, ...]
    """What an operator wants kept, or never stored, whatever the policy says."""

    def __post_init__(self) -> None:
        exchange = self.exchange
        if self.privacy.counts_samples:
            exchange.check_sample_privacy()
        if self.waiting.share and self.policy.unbounded:
            raise ConfigError(
                f"policy '{self.policy_name}' keeps everything, so that nothing has to wait: "
                "leave [waiting] out"
            )
        if self.rules and self.policy.unbounded:
            raise ConfigError(f"policy '{self.policy_name}' keeps everything: leave [[rule]] out")

    @property
    def exchange(self) -> GradientExchange:
        """What devices and server tell each other of gradients."""
        source: GradientSource = "stored" if self.estimator.name == "stored" else "arrivals"
        return gradient_exchange(self.policy, self.gist, source)

    @property
    def policy_name(self) -> str:
        """The policy's name in the configuration."""
        return self.names["policy"]


@dataclass(frozen=True)
class Method(MethodConfig):
    """A method and how it is trained; experiments add data, a fleet the form of its samples."""

    model: Table
    """`name`, `last_layers` and the factory's arguments."""
    coordinator: Coordinator
    train: TrainOptions
    limits: Limits
    seed: int

    @property
    def model_seed(self) -> int:
        """The seed of the first model."""
        return child_seed(self.seed, "model")

    def described(self) -> Table:
        """Every option with its value, as plain data."""
        table: Table = {"seed": self.seed, "model": dict(self.model)}
        for key in ("policy", "coordinator", "aggregation"):
            table[key] = {"name": self.names[key], **asdict(getattr(self, key))}
        table |= {key: asdict(getattr(self, key)) for key in METHOD_TABLES}
        return table | ({"rule": described_rules(self.rules)} if self.rules else {})

    def make_server(self, learner: Learner, model: Vector, regions: int) -> Server:
        """Make a server with this first model, before it knows any device.

        Parameters
        ----------
        learner : Learner
            Decides how long the gradients are that devices send.
        model : Vector
            The model of round 0.
        regions : int
            Among how many regions the plan divides the slots.
        """
        return Server(
            model=model,
            gradient_size=self.exchange.size(learner),
            regions=regions,
            schedule=self.train,
            coordinator=self.coordinator,
            estimator=self.exchange.estimator(
                self.estimator.name, self.estimator.max_age, normalise=self.estimator.normalise
            ),
            aggregation=self.aggregation,
            limits=self.limits,
            seed=self.seed,
            gradient_layout=self.exchange.layout(learner),
            noisy_gradients=self.privacy.protects("estimator"),
        )


@dataclass(frozen=True)
class Samples:
    """`samples`: what every device's samples look like."""

    shape: tuple[int, ...]
    labels: int | None = None
    """How many there are; of numbers to predict, leave it out."""
    names: tuple[str, ...] = ()
    """Of the labels, for people; their numbers unless given."""
    targets: Literal["class", "number"] = "class"
    """Whether targets are labels, or numbers to predict."""
    edges: tuple[float, ...] = ()
    """Where one interval of the numbers ends and the next begins: intervals stand for labels in
    plan and profiles. Empty: one interval."""
    width: int = 1
    """How many numbers a sample's target is, where targets are numbers."""

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape must be one or more positive numbers, got {list(self.shape)}")
        count, numbers = targets_of(self.targets, self.labels, self.edges, self.width)
        if numbers is None and count < 2:
            raise ValueError(
                f"labels must be at least 2, got {count}: a classifier tells some apart; of "
                'numbers to predict set targets = "number"'
            )
        if self.names and len(self.names) != count:
            raise ValueError(f"names must be {count}, one for each label, got {len(self.names)}")

    @property
    def count(self) -> int:
        """The number of labels, or of the intervals of numbers."""
        return targets_of(self.targets, self.labels, self.edges, self.width)[0]

    @property
    def numbers(self) -> NumberTargets | None:
        """What targets look like that are numbers; None: they are labels."""
        return targets_of(self.targets, self.labels, self.edges, self.width)[1]


@dataclass(frozen=True)
class FleetSpec(Method):
    """A fleet: its method, and the form of the samples its devices see.

    >>> spec = parse_fleet({"samples": {"shape": [30], "labels": 10}, "model": {"name": "softmax"}})
    >>> spec.server().round, spec.learner.size, spec.regions.count
    (0, 310, 10)
    """

    samples: Samples
    preset: str
    division: RegionOptions | Regions
    """How the distribution is divided: by label, or around centroids."""
    deployment: Mapping[str, Table]
    """The tables of `DEPLOYMENT_KEYS`, as they stand."""

    @cached_property
    def learner(self) -> Learner:
        """The learner of `[model]`, for samples of this form."""
        samples = self.samples
        return learner_of(self.model, samples.shape, samples.count, samples.numbers)

    @property
    def regions(self) -> Regions:
        """What the plan divides among the devices."""
        divided = self.policy.balanced or self.names["coordinator"] != "none"
        samples = self.samples
        own: Regions = LabelRegions(samples.count if divided else 1)
        if divided and samples.numbers is not None:
            own = TargetRegions(samples.numbers)
        return deployed_regions(self.division, own, samples.shape)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels' names; their numbers where none are given."""
        if self.samples.numbers is not None and not self.samples.names:
            return self.samples.numbers.names
        return self.samples.names or tuple(str(label) for label in range(self.samples.count))

    def server(self) -> Server:
        """Make the server with the initial model of the seed."""
        learner = self.learner
        return self.make_server(learner, learner.initial(self.model_seed), self.regions.count)


_FLEET_DEFAULTS: Table = {"estimator": {"name": "round-mean"}}
"""Where a server that is to scale differs from an experiment: it keeps no vector of any device."""


def division_of(table: Table) -> RegionOptions | Regions:
    """Read the table `regions` of a fleet or of an agent."""
    division: RegionOptions | Regions = parts_of(_REGION_TABLES, table)[0]["regions"]
    return division


def deployed_regions(
    division: RegionOptions | Regions, own: Regions, shape: tuple[int, ...]
) -> Regions:
    """Return the regions of a fleet, the same on server and devices.

    Parameters
    ----------
    division : RegionOptions or Regions
        What `division_of` read.
    own : Regions
        What the fleet divides by where nothing else is asked: labels, intervals of numbers, or
        one region where nobody divides slots.
    shape : tuple of int
        The shape of a sample.
    """
    if isinstance(division, RegionOptions):
        return own
    if own.count == 1:
        raise ConfigError("'regions' divides slots, and neither policy nor coordinator does")
    deployed = getattr(division, "deployed", None)
    regions: Regions = division if deployed is None else deployed(math.prod(shape))
    return regions


def parse_fleet(table: Table) -> FleetSpec:
    """Read a fleet's specification from a table; an unknown key is named in the error.

    >>> parse_fleet({"samples": {"shape": [30], "labels": 10}, "tran": {"rounds": 7}})
    Traceback (most recent call last):
    fedkeep.core.errors.ConfigError: unknown table 'tran': did you mean 'train'?
    """
    table = current(table)
    for key in table:
        if key not in FLEET_KEYS:
            raise ConfigError(f"unknown table '{key}': {did_you_mean(key, sorted(FLEET_KEYS))}")
    for key in _device_keys(table):
        raise ConfigError(f"'{key}' is a device's: set it in the agents' configuration instead")
    reject_keys(table, _SIMULATED_KEYS, "is for simulations: remove it from the fleet's")
    # A preset speaks of an experiment's data, too.
    tables = with_preset(table)
    if "max_age" not in table_of(tables, "estimator"):  # that speaks of what is kept of each device
        tables = merged(_FLEET_DEFAULTS, tables)
    method = method_parts({key: value for key, value in tables.items() if key in FLEET_KEYS})
    spec = FleetSpec(
        samples=build(Samples, table_of(table, "samples"), "samples"),
        preset=str(table.get("preset", DEFAULT)),
        division=division_of(table),
        deployment={key: dict(table_of(table, key)) for key in DEPLOYMENT_KEYS},
        **method,
    )
    if "exact" in (spec.estimator.name, spec.estimator.cold_start):
        raise ConfigError(
            "estimator 'exact' needs all devices' data in one place: it is for `fedkeep run` only"
        )
    _ = spec.regions  # what is wrong of them is named before anything starts
    if spec.policy.unbounded:
        raise ConfigError(
            f"policy '{spec.names['policy']}' keeps everything: it is for `fedkeep run` only"
        )
    return spec


def fleet_tables(table: Table) -> Table:
    """Keep what a server reads of tables that an app's devices share with it.

    >>> fleet_tables({"gist": {"mode": "local", "encoding": "int8"}, "storage": {"capacity": 5}})
    {'gist': {'mode': 'local'}}
    """
    table = {key: value for key, value in current(table).items() if key in FLEET_KEYS}
    kept = merged(table, {})
    for key in _device_keys(table):
        name, _, option = key.partition(".")
        if option:
            del kept[name][option]
        else:
            del kept[name]
    return {key: value for key, value in kept.items() if value != {} or table[key] == {}}


def _device_keys(table: Table) -> Iterator[str]:
    """List the keys of a fleet's tables that its server does not read, custom policies' apart."""
    yield from ["rule"] * ("rule" in table)
    for name, keys in _DEVICE_KEYS.items():
        yield from (f"{name}.{key}" for key in table_of(table, name) if key in keys)
    policy, options = named(table, "policy", default=DEFAULT_POLICY)
    if ":" not in policy:
        yield from (f"policy.{key}" for key in options)


def reject_keys(table: Table, rejected: Mapping[str, Collection[str]], words: str) -> None:
    """Raise a ConfigError for the first key that the tables must not have."""
    for name, keys in rejected.items():
        for key in table_of(table, name):
            if key in keys:
                raise ConfigError(f"'{name}.{key}' {words}")


def parse_method(table: Table) -> MethodConfig:
    """Read what devices store and exchange, as far as a device decides it; without a coordinator.

    Parameters
    ----------
    table : Table
        Tables of a configuration, preset and all; tables that are no part of the method are left
        to the caller.

    Returns
    -------
    MethodConfig
        With the preset's words where the table says nothing.

    Examples
    --------
    >>> method = parse_method({"policy": {"name": "ode"}, "preset": "paper"})
    >>> method.policy_name, method.storage.quotas, method.gist.kept
    ('ode', 'hard', False)
    """
    return MethodConfig(**_device_parts(with_preset(table), coordinated=None))


def _device_parts(table: Table, *, coordinated: bool | None) -> dict[str, Any]:
    """Build the fields of `MethodConfig`; `coordinated` None: as the policy needs it."""
    policy_name, options = named(table, "policy", default=DEFAULT_POLICY)
    policy = build(find_policy(policy_name), options, "policy")
    rule, options = named(table, "aggregation", default="fedavg")
    aggregation = build(find_component(AGGREGATORS, rule), options, "aggregation")
    parts, own = parts_of(DEVICE_TABLES, table)
    if not (policy.coordinated if coordinated is None else coordinated or policy.coordinated):
        parts["weights"] = UNCOORDINATED
    names = {"policy": policy_name, "aggregation": rule, **own}
    rules = rules_of(table)
    return {"policy": policy, "aggregation": aggregation, "names": names, "rules": rules, **parts}


def rules_of(table: Table) -> tuple[Rule, ...]:
    """Read the tables `[[rule]]`.

    >>> alarms = {"name": "alarms", "when": "alarm and speed >", "slots": 20}
    >>> rules_of({"rule": [alarms]})
    Traceback (most recent call last):
    fedkeep.core.errors.ConfigError: rule 'alarms': expected a field, a number or a text, found \
the end
        alarm and speed >
                         ^
    """
    given = table.get("rule", [])
    if not isinstance(given, list) or not all(isinstance(rule, dict) for rule in given):
        raise ConfigError("rules are written as [[rule]], with two brackets")
    rules = tuple(build(Rule, rule, f"rule[{number}]") for number, rule in enumerate(given))
    check_rules(rules)
    label_names = table_of(table, "samples").get("names", ()) if "samples" in table else ()
    conditions(rules, tuple(map(str, label_names)))
    return rules


def method_parts(table: Table) -> dict[str, Any]:
    """Build the fields of `Method` that a table describes; other keys are the caller's."""
    policy_name, options = named(table, "policy", default=DEFAULT_POLICY)
    policy = build(find_policy(policy_name), options, "policy")
    coordinator_name, coordinator = _coordinator(table, policy)
    parts = _device_parts(table, coordinated=coordinator_name != "none")
    rest, own = parts_of(_SERVER_TABLES, table)
    seed = table.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"'seed' must be a whole number of at least 0, got {seed!r}")
    parts["names"] |= {"coordinator": coordinator_name, **own}
    model = table_of(table, "model")
    return {"model": model, "coordinator": coordinator, "seed": seed, **parts, **rest}


def parts_of(tables: dict[str, type[Any]], table: Table) -> tuple[dict[str, Any], dict[str, str]]:
    """Build what tables of a fixed form describe, with the names of user-defined classes."""
    own = {
        key: name
        for key in tables
        if key in _OWN
        and (":" in (name := str(table_of(table, key).get("name", ""))) or name in _OWN[key])
    }
    parts = {
        key: build(cls, table_of(table, key), key) for key, cls in tables.items() if key not in own
    }
    for key, name in own.items():
        parts[key] = build(find_component(_OWN[key], name), named(table, key)[1], key)
    return parts, own


def with_preset(table: Table) -> Table:
    """Lay the table over what its preset sets for its policy."""
    remaining = {key: value for key, value in table.items() if key != "preset"}
    policy, _ = named(remaining, "policy", default=DEFAULT_POLICY)
    defaults = experiment_tables(str(table.get("preset", DEFAULT)), policy)
    # A robust mean must see single reports, which secure aggregation hides.
    if table_of(remaining, "privacy").get("secure_aggregation"):
        defaults = merged(defaults, {"aggregation": {"name": "fedavg"}})
    return merged(defaults, remaining)


def _coordinator(table: Table, policy: SelectionPolicy) -> tuple[str, Coordinator]:
    """Build the coordinator for this policy.

    The table applies to coordinated policies, unless it has `applies_to = "all"`.
    """
    name, options = named(table, "coordinator", default="greedy")
    applies_to = options.pop("applies_to", "coordinated")
    if applies_to not in {"coordinated", "all"}:
        raise ConfigError(
            f"'coordinator.applies_to' cannot be {applies_to!r}: it is 'coordinated' or 'all'"
        )
    if name == "none":
        # Limits that other methods of the file share do not matter to it.
        return "none", Uncoordinated()
    coordinator = build(find_component(COORDINATORS, name), options, "coordinator")
    return (
        (name, coordinator)
        if policy.coordinated or applies_to == "all"
        else ("none", Uncoordinated())
    )


def named(table: Table, key: str, default: str | None = None) -> tuple[str, Table]:
    """Split a table into its `name`, which must be there without a default, and the rest."""
    options = dict(table_of(table, key))
    name = options.pop("name", default)
    if not isinstance(name, str):
        raise ConfigError(
            f"'{key}.name' is missing" if name is None else f"'{key}.name' must be a string"
        )
    return name, options


def table_of(table: Table, key: str) -> Table:
    """Return the table under a key, empty where there is none."""
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"'{key}' must be a table, got {found!r}")
    return found
