"""An experiment: a TOML file's tables, resolved to the components they name."""

import dataclasses
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from fedkeep.config import canonical
from fedkeep.config.aliases import current
from fedkeep.config.method import (
    METHOD_KEYS,
    METHOD_TABLES,
    Method,
    method_parts,
    named,
    parts_of,
    reject_keys,
    with_preset,
)
from fedkeep.config.methods import method_tables
from fedkeep.config.options import CorrectionOptions, ProfileOptions, RecordOptions, RegionOptions
from fedkeep.core.errors import ConfigError
from fedkeep.core.regions import Regions
from fedkeep.core.registry import did_you_mean
from fedkeep.core.rules.options import described as described_rules
from fedkeep.data import TASKS, StreamOptions, Task
from fedkeep.loading import find_component
from fedkeep.tables import Table, build, flat, merged, put, read_toml

_DATA_TABLES: dict[str, type[Any]] = {
    "stream": StreamOptions,
    "correction": CorrectionOptions,
    "profile": ProfileOptions,
    "regions": RegionOptions,
    "record": RecordOptions,
}
TABLES: dict[str, type[Any]] = {**METHOD_TABLES, **_DATA_TABLES}
"""The tables of an experiment whose keys are always the same."""
_DEPLOYED_KEYS = {"privacy": {"sum_threshold", "min_cohort", "members", "member_key", "public_key"}}
"""Keys of a method that no simulation reads."""
_KEYS = {"task", "label", *_DATA_TABLES, *METHOD_KEYS}


@dataclass(frozen=True)
class Experiment(Method):
    """One run: a method and the data to try it on, every choice made."""

    task: Task
    stream: StreamOptions
    correction: CorrectionOptions
    profile: ProfileOptions
    regions: RegionOptions | Regions
    record: RecordOptions
    label: str
    """What tables and legends call the method."""

    @classmethod
    def from_table(cls, table: Table) -> "Experiment":
        """Resolve the tables of a single run; see `resolve`."""
        return resolve(table)

    def resolved(self) -> Table:
        """Every option with its value, as plain data."""
        data = {key: dataclasses.asdict(getattr(self, key)) for key in ("task", *_DATA_TABLES)}
        data["task"] = {"name": self.names["task"], **data["task"]}
        if "regions" in self.names:
            data["regions"]["name"] = self.names["regions"]
        return {"label": self.label, **self.described(), **data}

    def digest(self) -> str:
        """Hash the experiment; two runs with the same hash give the same bytes.

        It is the hash of the frozen canonical form (`config.canonical`): an option that is added,
        renamed, or gets another default leaves the hashes of finished runs as they are.
        """
        keys = ("task", "policy", "coordinator", "aggregation", *METHOD_TABLES, *_DATA_TABLES)
        rules = {"rules": described_rules(self.rules)} if self.rules else {}
        return canonical.digest(self, {key: getattr(self, key) for key in keys}, rules)


def read_experiment(path: Path, above: tuple[Path, ...] = ()) -> Table:
    """Read the tables of an experiment file.

    `base = "other.toml"`, or a list of files, takes the tables of other files first.

    Raises
    ------
    ConfigError
        If a file is missing or no TOML, or if it is its own base.
    """
    if path.resolve() in above:
        raise ConfigError(f"{path} is its own base: take it out of the files named as 'base'")
    table = current(read_toml(path))
    bases = table.pop("base", [])
    below: Table = {}
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise ConfigError(f"'base' in {path} must be the name of a file, got {base!r}")
        below = merged(below, read_experiment(path.parent / base, (*above, path.resolve())))
    return merged(below, table)


def override(table: Table, settings: list[str]) -> Table:
    """Put each `key=value` of `settings` into the table; values are TOML, bare words strings.

    >>> override({"train": {"rounds": 100}}, ["train.rounds=20", "policy.name=ode"])
    {'train': {'rounds': 20}, 'policy': {'name': 'ode'}}
    """
    changes: Table = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes key=value, got '{setting}'")
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        except RecursionError:
            raise ConfigError(f"--set {key.strip()} nests too deep") from None
        put(changes, key.strip(), value)
    return merged(table, current(changes))


def resolve(table: Table) -> Experiment:
    """Resolve a table without sweeps and methods to the experiment that it describes.

    >>> table = {"task": {"name": "demo"}, "policy": {"name": "ode"}, "storage": {"capacity": 5}}
    >>> experiment = resolve(table)
    >>> experiment.label, experiment.storage.capacity, experiment.train.epochs
    ('ode', 5, 5)
    """
    if not isinstance(table, dict):
        raise ConfigError(f"an experiment is a table of tables, got {table!r}")
    table = current(table)
    _check_label(table.get("label"))
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"unknown key '{key}': {did_you_mean(key, _KEYS)}")
    reject_keys(table, _DEPLOYED_KEYS, "is for deployed devices: remove it from the experiment")
    name, options = named(table, "task")
    task = find_component(TASKS, name)
    table = _with_rate_of(task, with_preset(table))
    method = method_parts(table)
    data, own = parts_of(_DATA_TABLES, table)
    method["names"] |= {"task": name, **own}
    return Experiment(
        task=build(task, options, "task"),
        label=str(table.get("label", method["names"]["policy"])),
        **method,
        **data,
    )


def _check_label(label: object) -> None:
    """Reject what could not name a file or head a column."""
    if label is None or (isinstance(label, str) and label and label.isprintable()):
        return
    raise ConfigError(f"'label' must be a name of printable characters, got {label!r}")


def _with_rate_of(task: type[Task], table: Table) -> Table:
    """Return the table with the task's own learning rate, where it has one and none is set."""
    rate = getattr(task, "learning_rate", None)
    return table if rate is None else merged({"train": {"learning_rate": rate}}, table)


@dataclass(frozen=True)
class RunSpec:
    """One run of a sweep: its tables, and what the sweep varies besides method and seed."""

    table: Table
    setting: str

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment that the tables describe."""
        return resolve(self.table)

    def __getstate__(self) -> Table:
        """Give the tables alone: a worker may be unable to import a custom policy by its name."""
        return {"table": self.table, "setting": self.setting}

    @property
    def name(self) -> str:
        """A file name that is unique in the sweep."""
        parts = [
            self.experiment.label,
            self.setting.replace(" ", "_"),
            f"seed{self.experiment.seed}",
        ]
        return "-".join(part for part in parts if part).replace("/", "_")


def expand(table: Table) -> list[RunSpec]:
    """List the runs of an experiment file: every method, times every combination in `[sweep]`.

    >>> methods = {"fifo": {"policy": {"name": "fifo"}}, "ode": {"policy": {"name": "ode"}}}
    >>> table = {"task": {"name": "demo"}, "methods": methods}
    >>> table["sweep"] = {"storage.capacity": [5, 10]}
    >>> for cell in expand(table):
    ...     print(cell.name)
    fifo-storage.capacity=5-seed0
    fifo-storage.capacity=10-seed0
    ode-storage.capacity=5-seed0
    ode-storage.capacity=10-seed0
    """
    table = current(table)
    sweep, methods = table.pop("sweep", {}), table.pop("methods", {})
    if isinstance(methods, list):
        if not methods or len(set(map(str, methods))) < len(methods):
            raise ConfigError(f"'methods' must be one or more different names, got {methods!r}")
        methods = method_tables(map(str, methods))
    if not isinstance(methods, dict):
        raise ConfigError(
            f"'methods' must be a list of names, such as [\"fifo\"], or tables, got {methods!r}"
        )
    if not isinstance(sweep, dict):
        raise ConfigError(f"'sweep' must be a table of lists, got {sweep!r}")
    sweep = dict(flat(sweep))
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"'sweep.{key}' must be a list of one or more values, got {values!r}")
    for label, overrides in methods.items():
        if not isinstance(overrides, dict):
            raise ConfigError(
                f"'methods.{label}' must be a table of what differs, got {overrides!r}"
            )
    tables = [merged(table, {"label": label, **overrides}) for label, overrides in methods.items()]
    choices = [dict(zip(sweep, values, strict=True)) for values in product(*sweep.values())]
    cells = [_cell(method, chosen) for method in tables or [table] for chosen in choices]
    # Resolves all, so that a mistake is reported before anything runs.
    names = Counter(cell.name for cell in cells)
    if len(names) < len(cells):
        twice = names.most_common(1)[0][0]
        raise ConfigError(
            f"two runs would both be called '{twice}': "
            "give each method a label or a seed of its own"
        )
    return cells


def _cell(table: Table, chosen: Table) -> RunSpec:
    cell = merged(table, {})
    for key, value in chosen.items():
        put(cell, key, value)
    varied = [
        f"{key}={value}"
        for key, value in chosen.items()
        if key not in {"seed", "policy.name", "label"}
    ]
    return RunSpec(cell, " ".join(varied))
