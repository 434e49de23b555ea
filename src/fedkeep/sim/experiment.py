"""An experiment: a TOML file's tables, resolved to the components they name."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedkeep.config import Table, build, merged, put
from fedkeep.core.aggregation import Aggregation
from fedkeep.core.coordination import COORDINATORS, Coordinator, Uncoordinated
from fedkeep.core.errors import ConfigError
from fedkeep.core.names import did_you_mean, find
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.screening import Limits
from fedkeep.core.weighting import UNCOORDINATED, Weighting
from fedkeep.data import TASKS, StreamOptions, Task
from fedkeep.presets import DEFAULT, experiment_tables
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.registry import find_policy
from fedkeep.sim.options import (
    EstimatorOptions,
    ProfileOptions,
    RecordOptions,
    RegionOptions,
    StorageOptions,
    TrainOptions,
)

_PLAIN: dict[str, type[Any]] = {
    "storage": StorageOptions,
    "weights": Weighting,
    "estimator": EstimatorOptions,
    "train": TrainOptions,
    "stream": StreamOptions,
    "aggregation": Aggregation,
    "profile": ProfileOptions,
    "regions": RegionOptions,
    "limits": Limits,
    "privacy": PrivacyOptions,
    "record": RecordOptions,
}
_KEYS = {"task", "model", "policy", "coordinator", "seed", "label", "preset", *_PLAIN}


@dataclass(frozen=True)
class Experiment:
    """One run, every choice made."""

    task: Task
    model: Table
    """Overrides of the task's model: `name`, `last_layers` and the factory's arguments."""
    policy: SelectionPolicy
    coordinator: Coordinator
    storage: StorageOptions
    weights: Weighting
    estimator: EstimatorOptions
    train: TrainOptions
    stream: StreamOptions
    aggregation: Aggregation
    profile: ProfileOptions
    regions: RegionOptions
    limits: Limits
    privacy: PrivacyOptions
    record: RecordOptions
    seed: int
    label: str
    """What tables and legends call the method."""
    names: dict[str, str]
    """The registered names of task, policy and coordinator."""

    def resolved(self) -> Table:
        """Every option with its value, as plain data."""
        table: Table = {"seed": self.seed, "label": self.label, "model": dict(self.model)}
        for key in ("task", "policy", "coordinator"):
            table[key] = {"name": self.names[key], **dataclasses.asdict(getattr(self, key))}
        for key in _PLAIN:
            table[key] = dataclasses.asdict(getattr(self, key))
        return table

    def digest(self) -> str:
        """A short hash of every option; two runs with the same hash give the same bytes."""
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()[:16]


def resolve(table: Table) -> Experiment:
    """The experiment that a table without sweeps and methods describes."""
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"unknown key '{key}': {did_you_mean(key, _KEYS)}")
    table = _with_preset(table)
    policy_table = _named(table, "policy", default="ode")
    policy = build(find_policy(policy_table["name"]), _rest(policy_table), "policy")
    task_table = _named(table, "task")
    coordinator_name, coordinator = _coordinator(table, policy)
    plain = {key: build(cls, _table(table, key), key) for key, cls in _PLAIN.items()}
    if not policy.coordinated and coordinator_name == "none":
        plain["weights"] = UNCOORDINATED
    seed = table.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"'seed' must be a whole number of at least 0, got {seed!r}")
    return Experiment(
        task=build(find(task_table["name"], TASKS, "task"), _rest(task_table), "task"),
        model=_table(table, "model"),
        policy=policy,
        coordinator=coordinator,
        seed=seed,
        label=str(table.get("label", policy_table["name"])),
        names={"task": task_table["name"], "policy": policy_table["name"], "coordinator": coordinator_name},
        **plain,
    )


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its tables, and what the sweep varies besides method and seed."""

    table: Table
    setting: str

    @cached_property
    def experiment(self) -> Experiment:
        return resolve(self.table)

    def __getstate__(self) -> Table:
        """Just the tables travel to a worker: a policy of one's own may not be importable there by name alone."""
        return {"table": self.table, "setting": self.setting}

    @property
    def name(self) -> str:
        """A file name that is unique in the sweep."""
        parts = [self.experiment.label, self.setting.replace(" ", "_"), f"seed{self.experiment.seed}"]
        return "-".join(part for part in parts if part).replace("/", "_")


def expand(table: Table) -> list[Cell]:
    """The runs of an experiment file: every method, times every combination in `[sweep]`."""
    table = dict(table)
    sweep, methods = table.pop("sweep", {}), table.pop("methods", {})
    if not isinstance(sweep, dict) or not isinstance(methods, dict):
        raise ConfigError("'sweep' and 'methods' must be tables")
    sweep = dict(_flat(sweep))
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"'sweep.{key}' must be a list of values, got {values!r}")
    cells = [cell for method in _methods(table, methods) for cell in _product(method, sweep)]
    names = Counter(cell.name for cell in cells)  # resolves all, so that a mistake is told before anything runs
    if len(names) < len(cells):
        twice = names.most_common(1)[0][0]
        raise ConfigError(f"two runs would both be called '{twice}': give each method a label or a seed of its own")
    return cells


def _flat(table: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, however the file nests them."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _methods(table: Table, methods: Table) -> Iterator[Table]:
    if not methods:
        yield table
    for label, overrides in methods.items():
        if not isinstance(overrides, dict):
            raise ConfigError(f"'methods.{label}' must be a table of what differs, got {overrides!r}")
        yield merged(table, {"label": label, **overrides})


def _product(table: Table, sweep: Table) -> Iterator[Cell]:
    for values in itertools.product(*sweep.values()):
        cell = merged(table, {})
        for key, value in zip(sweep, values, strict=True):
            put(cell, key, value)
        varied = [f"{k}={v}" for k, v in zip(sweep, values, strict=True) if k not in {"seed", "policy.name", "label"}]
        yield Cell(cell, " ".join(varied))


def _coordinator(table: Table, policy: SelectionPolicy) -> tuple[str, Coordinator]:
    """The coordinator for this policy; a table speaks of coordinated policies, unless it says `applies_to = "all"`."""
    given = _named(table, "coordinator", default="greedy")
    applies_to = given.pop("applies_to", "coordinated")
    if applies_to not in {"coordinated", "all"}:
        raise ConfigError(f"'coordinator.applies_to' cannot be {applies_to!r}: it is 'coordinated' or 'all'")
    if given["name"] == "none":
        return "none", Uncoordinated()  # limits that other methods of the file share do not matter to it
    cls = find(given["name"], COORDINATORS, "coordinator")
    coordinator = build(cls, _rest(given), "coordinator")
    if policy.coordinated or applies_to == "all":
        return given["name"], coordinator
    return "none", Uncoordinated()


def _with_preset(table: Table) -> Table:
    rest = {key: value for key, value in table.items() if key != "preset"}
    policy = _named(rest, "policy", default="ode")["name"]
    said = experiment_tables(str(table.get("preset", DEFAULT)), policy)
    if _table(rest, "privacy").get("secure_sum"):  # a robust mean must see single reports
        said = merged(said, {"aggregation": {"name": "fedavg"}})
    return merged(said, rest)


def _named(table: Table, key: str, default: str | None = None) -> Table:
    found = dict(_table(table, key))
    found.setdefault("name", default)
    if not isinstance(found["name"], str):
        raise ConfigError(f"'{key}.name' is missing" if found["name"] is None else f"'{key}.name' must be a string")
    return found


def _rest(table: Table) -> Table:
    return {key: value for key, value in table.items() if key != "name"}


def _table(table: Table, key: str) -> Table:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"'{key}' must be a table, got {found!r}")
    return found
