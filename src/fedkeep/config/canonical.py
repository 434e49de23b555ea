"""The canonical form of an experiment, which its hash is computed from: frozen, and versioned.

Results are stored under these hashes, so that the form must not follow the code: keys, names and
default values below are those of version 1, whatever they are called or default to today. An option
that version 1 does not have is part of the form where it is not at its own default.

An option that is renamed gets its former name here. A default that changes stays here as it was:
experiments with the new default get a new hash, and an old hash never stands for another value.
What the form itself consists of changes with its version only.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

from fedkeep.tables import Table

VERSION = 1
_REQUIRED = dataclasses.MISSING

_NAMES: dict[str, dict[str, str]] = {
    "policy": {"balanced-reservoir": "draw"},
    "task": {"demo": "embedded", "custom": "own"},
}
"""Components whose registered name is another today: today's name, and that of the form."""

_KEYS: dict[str, dict[str, str]] = {
    "storage": {"rescore": "revalue"},
    "gist": {
        "mode": "name",
        "drift_weight": "kappa",
        "label_matching": "matched",
        "max_ess": "memory",
    },
    "privacy": {
        "planned_participations": "releases",
        "retransmissions": "resends",
        "on_exhausted": "when_spent",
        "secure_aggregation": "secure_sum",
        "min_cohort": "sum_least",
    },
}
"""By table: today's key, and that of the form."""

_VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("storage", "quotas"): {"soft": "targets", "hard": "fixed"},
    ("storage", "after_use"): {"evict_trained_first": "renew"},
    ("estimator", "name"): {"round-mean": "participants"},
}
"""By table and key of the form: today's value, and that of the form."""

_RESOLVED = {("gist", "encoding"): "used_encoding"}
"""By table and key of the form: options that may be left out, and the property that says what is
used then. Left out or said, the same run has the same hash."""

_NAMED_BY_OPTION = {"aggregation": "fedavg"}
"""Tables whose component's name is an option of the form, with its default.

Custom classes, by `module:Class`, stand among the names of the form all the same.
"""

_LATER = frozenset({"waiting"})
"""Tables that version 1 does not have: part of the form where something in them is set."""

_DEFAULTS: dict[str, Table] = {
    "storage": {
        "revalue": True,
        "max_age": None,
        "quotas": "targets",
        "capacity": 10,
        "after_use": "keep",
        "discount": 1,
    },
    "weights": {
        "client_label": 0.0,
    },
    "estimator": {
        "name": "incremental",
        "cold_start": "none",
        "max_age": None,
        "exact_samples": None,
    },
    "gist": {
        "name": "none",
        "kappa": 0.5,
        "fading": 3.0,
        "matched": True,
        "memory": 100.0,
        "contrast": 10.0,
        "encoding": "float32",
        "last_layers": None,
    },
    "train": {
        "learning_rate": 0.001,
        "epochs": 5,
        "batch_size": None,
        "proximal": 0.0,
        "decay": 0.95,
        "decay_every": 100,
        "rounds": 100,
        "participation": 0.1,
        "dropout": 0.0,
    },
    "limits": {
        "update_norm": 1000.0,
        "update_ratio": 10.0,
        "gradient_norm": 1000.0,
        "growth": 10.0,
    },
    "privacy": {
        "epsilon": None,
        "delta": 1e-05,
        "unit": "sample",
        "protect": ("estimator",),
        "clip": 1.0,
        "model_clip": 1.0,
        "profile_bound": 100.0,
        "releases": 1,
        "resends": 0,
        "when_spent": "without-estimator",
        "secure_sum": False,
        "sum_threshold": 0.5,
        "sum_least": None,
        "members": "",
        "member_key": "",
        "encrypted_profiles": False,
        "public_key": "",
    },
    "stream": {
        "rounds_per_pass": None,
        "shuffle": True,
        "burst": 0.0,
        "drift": 0.0,
        "drift_passes": 1,
        "label_noise": 0.0,
        "outliers": 0.0,
        "outlier_scale": 10.0,
        "encoding": "float32",
        "deflate_to": None,
    },
    "correction": {
        "name": "none",
    },
    "profile": {
        "measured": False,
        "every": 20,
        "window": 1000.0,
    },
    "regions": {
        "name": "label",
    },
    "record": {
        "every": 20,
        "devices": 1,
        "checkpoint_every": 100,
        "prequential": False,
    },
    "waiting": {
        "share": 0.0,
        "rule": "random",
        "max_age": None,
        "early_labels": 64,
        "pseudo_labels": None,
    },
    "policy.fedbalancer": {
        "variant": "paper",
        "window": 50,
    },
    "policy.full-data": {
        "so_far": False,
    },
    "policy.ode": {
        "value": "projection",
        "clip": 3.0,
        "choice": "greatest",
        "sharpness": 0.5,
    },
    "policy.reservoir": {
        "restart": False,
    },
    "policy.sld": {
        "variant": "paper",
        "window": 50,
    },
    "coordinator.greedy": {
        "clients_per_label": 5,
        "labels_per_client": None,
        "quantities": "even",
        "improve_up_to": 1000,
    },
    "aggregation.trimmed": {
        "trim": 0.1,
    },
    "task.audio-mnist": {
        "model": "mlp",
    },
    "task.embedded": {
        "devices": 40,
        "labels": 10,
        "features": 30,
        "smallest": 400,
        "largest": 800,
        "clusters": 1,
        "spread": 8.0,
        "generator_seed": 42,
        "test_fraction": 0.2,
    },
    "task.fashion-mnist": {
        "partition": {"name": "labels", "devices": 50, "labels": 5},
    },
    "task.har": {
        "dataset": "geotec",
        "test_fraction": 0.1,
    },
    "task.own": {
        "path": None,
        "source": None,
        "device": "device",
        "label": "label",
        "shape": None,
        "standardise": True,
        "test_fraction": 0.1,
        "partition": {"name": "natural"},
        "model": "softmax",
        "model_options": {},
        "rounds_per_pass": 500,
    },
    "task.synthetic": {
        "devices": 200,
        "labels": 10,
        "features": 60,
        "smallest": 5000,
        "largest": 6000,
        "clusters": 1,
        "spread": 1.0,
        "generator_seed": 42,
        "test_fraction": 0.1,
    },
    "task.traffic": {
        "dataset": "generated",
        "devices": 30,
        "applications": 20,
        "applications_per_device": 15,
        "samples": 37853,
        "generator_seed": 2019,
        "test_fraction": 0.2,
        "partition": {"name": "dirichlet", "devices": 30, "alpha": 0.3, "minimum": 10},
    },
    "task.uji-indoor": {
        "model": "mlp",
    },
    "task.westermo": {
        "model": "softmax",
        "label": "y",
    },
}
"""By table, in the words of the form; tables of policies and tasks go by the component's name."""


class Described(Protocol):
    """What has a canonical form: an experiment's seed, label, model, names and tables."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

    @property
    def label(self) -> str:
        """What tables and legends call the method."""

    @property
    def model(self) -> Table:
        """The table `[model]`."""

    @property
    def names(self) -> dict[str, str]:
        """The registered names of the components, by table."""


def digest(
    experiment: Described, tables: Mapping[str, Any], beside: Mapping[str, Any] | None = None
) -> str:
    """Hash an experiment: two experiments with the same hash give the same bytes.

    Parameters
    ----------
    experiment : Described
        The experiment.
    tables : Mapping[str, Any]
        The dataclass of options behind each of its tables, by the table's key.
    beside : Mapping[str, Any], optional
        What version 1 did not have, as plain data, where it is set.

    Returns
    -------
    str
        Sixteen hexadecimal digits.
    """
    form = canonical_form(experiment, tables) | dict(beside or {})
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:16]


def canonical_form(experiment: Described, tables: Mapping[str, Any]) -> Table:
    """Build the canonical form: what is not at the defaults of version 1, in its words."""
    names = {key: stored_name(key, name) for key, name in experiment.names.items()}
    unlabelled = experiment.label == experiment.names["policy"]
    form: Table = {
        "seed": experiment.seed,
        "label": names["policy"] if unlabelled else experiment.label,
        "model": dict(experiment.model),
        "names": names,
    }
    for key, options in tables.items():
        if key not in _LATER or options != type(options)():
            form[key] = _set_options(key, names.get(key), options)
    for key, default in _NAMED_BY_OPTION.items():
        if ":" in names.get(key, default):
            continue
        name = names.pop(key, default)
        if name != default:
            form.setdefault(key, {})["name"] = name
    return form


def stored_name(table: str, name: str) -> str:
    """Return the name of a component in stored data, such as hashes and the log of decisions.

    >>> stored_name("policy", "balanced-reservoir"), stored_name("policy", "ode")
    ('draw', 'ode')
    """
    return _NAMES.get(table, {}).get(name, name)


def present_name(table: str, stored: str) -> str:
    """Return the registered name behind a name in stored data.

    >>> present_name("policy", "draw")
    'balanced-reservoir'
    """
    former = {old: new for new, old in _NAMES.get(table, {}).items()}
    return former.get(stored, stored)


def _set_options(table: str, component: str | None, options: Any) -> Table:
    """Collect the options of one table that are not at the form's defaults."""
    frozen = _DEFAULTS.get(f"{table}.{component}" if component else table, {})
    found: Table = {}
    for field in dataclasses.fields(options):
        key = _KEYS.get(table, {}).get(field.name, field.name)
        used = getattr(options, _RESOLVED.get((table, key), field.name))
        value = _former_value(table, key, used)
        default = frozen[key] if key in frozen else _own_default(field)
        if value != default:
            found[key] = value
    return found


def _former_value(table: str, key: str, value: Any) -> Any:
    words = _VALUES.get((table, key), {})
    return words.get(value, value) if isinstance(value, str) else value


def _own_default(field: "dataclasses.Field[Any]") -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()
