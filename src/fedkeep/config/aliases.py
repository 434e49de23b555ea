"""Former words of configurations: keys, values and command line options that have a new name.

Each is accepted for one release, with a warning of one line that names the new word. This is the
only place that knows them: whatever reads a configuration passes it through `current` first.
"""

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from fedkeep.core.errors import ConfigError
from fedkeep.tables import Table, merged, put

log = logging.getLogger(__name__)

KEYS: dict[str, str] = {
    "gist.name": "gist.mode",
    "gist.kappa": "gist.drift_weight",
    "gist.memory": "gist.max_ess",
    "gist.matched": "gist.label_matching",
    "storage.revalue": "storage.rescore",
    "device.revalue": "storage.rescore",
    "device.rescore": "storage.rescore",
    "device.max_age": "storage.max_age",
    "device.quotas": "storage.quotas",
    "device.gradient_from": "estimator.name",
    "after_use.name": "storage.after_use",
    "after_use.discount": "storage.discount",
    "privacy.releases": "privacy.planned_participations",
    "privacy.resends": "privacy.retransmissions",
    "privacy.when_spent": "privacy.on_exhausted",
    "privacy.sum_least": "privacy.min_cohort",
    "privacy.secure_sum": "privacy.secure_aggregation",
}
"""Dotted keys: the former one, and the present one."""

VALUES: dict[str, dict[str, str]] = {
    "policy.name": {"draw": "balanced-reservoir"},
    "task.name": {"embedded": "demo", "own": "custom"},
    "estimator.name": {"participants": "round-mean", "arrivals": "incremental"},
    "storage.quotas": {"targets": "soft", "fixed": "hard"},
    "storage.after_use": {"renew": "evict_trained_first"},
}
"""Values by their present key: the former word, and the present one."""

RETIRED: dict[str, float] = {"gist.fading": 3.0, "gist.contrast": 10.0}
"""Former options that are constants now, with the value that each has."""

OPTIONS: dict[str, tuple[str, dict[str, str]]] = {"--on": ("--backend", {"here": "local"})}
"""Options of the command line: the present one, and its values that have another name."""


class _Entry(NamedTuple):
    """A value of a table, and the keys that lead to it."""

    path: tuple[str, ...]
    value: Any


def current(table: Table) -> Table:
    """Translate former keys and values; each is warned of once.

    Keys of `methods` and `sweep` are translated like those of the tables that they vary.

    Parameters
    ----------
    table : Table
        An experiment's, a fleet's or an agent's tables.

    Returns
    -------
    Table
        The same configuration in present words; the argument stays as it is.

    Raises
    ------
    ConfigError
        If a key is set under both names, or a retired one to another value than the constant.

    Examples
    --------
    >>> current({"gist": {"name": "local"}, "sweep": {"storage.quotas": ["targets", "fixed"]}})
    {'gist': {'mode': 'local'}, 'sweep': {'storage.quotas': ['soft', 'hard']}}
    """
    result = merged(table, {})
    for path, value in [*_entries(table)]:
        scope, key = _split(path)
        if key in RETIRED:
            _check_retired(key, value)
            _remove(result, path)
            continue
        new = KEYS.get(key, key)
        words = _translated(new, value)
        if new == key and words == value:
            continue
        if new != key:
            _warn(f"'{key}'", f"'{new}'")
            if _at(result, (*scope, *new.split("."))) is not None:
                raise ConfigError(f"'{key}' is the former name of '{new}': keep one of the two")
        _remove(result, path)
        if scope[:1] == ("sweep",):
            result.setdefault("sweep", {})[new] = words
        else:
            put(result, ".".join(f'"{part}"' for part in (*scope, *new.split("."))), words)
    return result


def current_option(option: str, value: str) -> str:
    """Translate the value of a former command line option, with a warning."""
    new, words = OPTIONS[option]
    _warn(option, new)
    return words.get(value, value)


def _entries(table: Table, path: tuple[str, ...] = ()) -> Iterator[_Entry]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _entries(value, (*path, key))
        else:
            yield _Entry((*path, key), value)


def _split(path: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Split off what a key stands under: `methods` and a label, `sweep`, or nothing."""
    depth = {"methods": 2, "sweep": 1}.get(path[0], 0)
    return path[:depth], ".".join(path[depth:])


def _translated(key: str, value: Any) -> Any:
    """Translate a value into present words; a sweep has a list of them."""
    words = VALUES.get(key, {})
    if isinstance(value, list):
        return [_translated(key, one) for one in value]
    if not isinstance(value, str) or value not in words:
        return value
    _warn(f"{key} = '{value}'", f"'{words[value]}'")
    return words[value]


def _check_retired(key: str, value: Any) -> None:
    constant = RETIRED[key]
    if value != constant:
        raise ConfigError(f"'{key}' is no option any more: it is always {constant:g}; remove it")
    _warn(f"'{key}'", f"a constant ({constant:g}): remove it")


def _remove(table: Table, path: tuple[str, ...]) -> None:
    """Remove an entry, and the tables that it leaves empty."""
    *above, last = path
    holder = _at(table, tuple(above))
    del holder[last]
    if above and not holder:
        _remove(table, tuple(above))


def _at(table: Table, path: tuple[str, ...]) -> Any:
    found: Any = table
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found


@cache
def _warn(old: str, new: str) -> None:
    """Once a process: a sweep would repeat it for every run."""
    log.warning("%s is the former name of %s; it is accepted for one release", old, new)
