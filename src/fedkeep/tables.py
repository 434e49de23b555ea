"""Configuration: tables of a TOML file to the dataclasses that own their keys."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from fedkeep.core.errors import ConfigError
from fedkeep.core.registry import did_you_mean

Options = TypeVar("Options")
Table = dict[str, Any]
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
"""What messages call the types of msgspec."""
_DEEPEST = 32
"""Levels of tables and lists in a file."""


def build(options: type[Options], table: Table, where: str) -> Options:
    """Build the dataclass `options` from a table.

    Raises
    ------
    ConfigError
        For a wrong key or value, which is named with what is allowed.

    Examples
    --------
    >>> from fedkeep.config.options import StorageOptions
    >>> build(StorageOptions, {"capacity": 5}, "storage").capacity
    5
    >>> build(StorageOptions, {"capacitty": 5}, "storage")
    Traceback (most recent call last):
    fedkeep.core.errors.ConfigError: unknown key 'storage.capacitty': did you mean 'capacity'?
    """
    fields = {field.name for field in dataclasses.fields(options) if field.init}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ConfigError(f"unknown key '{where}.{key}': {did_you_mean(key, sorted(fields))}")
    try:
        return msgspec.convert(table, options)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(options, table, str(error), where)) from error
    except ValueError as error:
        raise ConfigError(f"in [{where}]: {error}") from error


def read_toml(path: Path) -> Table:
    """Read the tables of a TOML file; a ConfigError says why that cannot be done."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: save it as such") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path} nests deeper than any configuration does") from None
    if _is_too_deep(table):
        raise ConfigError(f"{path} nests deeper than any configuration does")
    return table


def _is_too_deep(table: Table) -> bool:
    """Whether tables and lists nest so deep that reading them could exhaust the stack."""
    level: list[Any] = [table]
    for _ in range(_DEEPEST):
        inner = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [one for values in inner for one in values if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def put(table: Table, key: str, value: Any) -> None:
    """Set a dotted key, making tables on the way; quotes hold a part together.

    >>> table = {}
    >>> put(table, 'sweep."storage.capacity"', [5, 10])
    >>> table
    {'sweep': {'storage.capacity': [5, 10]}}
    """
    parts = [quoted or bare for quoted, bare in re.findall(r'"([^"]+)"|([^".]+)', key)]
    if not parts:
        raise ConfigError(f"'{key}' is no key: write it as table.key")
    *parents, last = parts
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"'{parent}' in '{key}' is a value, not a table")
    table[last] = value


def merged(below: Table, above: Table) -> Table:
    """Lay `above` over `below`, table by table; the result shares no table with either.

    >>> merged({"train": {"rounds": 9, "epochs": 1}}, {"train": {"rounds": 5}, "seed": 1})
    {'train': {'rounds': 5, 'epochs': 1}, 'seed': 1}
    """
    result = {
        key: merged(value, {}) if isinstance(value, dict) else value for key, value in below.items()
    }
    for key, value in above.items():
        old = result.get(key)
        result[key] = (
            merged(old if isinstance(old, dict) else {}, value)
            if isinstance(value, dict)
            else value
        )
    return result


def flat(table: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """List dotted keys and their values, however the tables nest them.

    >>> dict(flat({"train": {"rounds": 9}, "seed": 1}))
    {'train.rounds': 9, 'seed': 1}
    """
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _in_words(found: re.Match[str]) -> str:
    """Return the types of a message in words: "expected a whole number, got text"."""
    names = [_TYPES.get(name, name) for name in found[2].split(" | ")]
    return f"{found[1]} {' or '.join(names)}"


def _explain(options: type[Any], table: Table, message: str, where: str) -> str:
    """Complete a message of msgspec by the key, its value and what is allowed."""
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", message):
        return f"'{where}.{missing[1]}' is missing"
    what, _, path = message.partition(" - at `$.")
    what = re.sub(r"(Expected|got) `([\w| ]+)`", _in_words, what)
    key = path.rstrip("`").partition("[")[0].partition(".")[0]
    if key not in table:
        return f"in [{where}]: {what.replace('`', chr(39))}"
    allowed = get_args(get_type_hints(options)[key])
    words = [word for word in allowed if isinstance(word, str)]
    hint = did_you_mean(str(table[key]), words) if words else what.replace("`", "'")
    return f"'{where}.{key}' cannot be {table[key]!r}: {hint[0].lower()}{hint[1:]}"
