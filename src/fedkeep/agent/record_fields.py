"""Where a record has its numbers, label, id and time, and what else it says of itself."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec

Scalar: TypeAlias = bool | int | float | str
NAMES = ("x", "y", "id", "time")
MOST_FIELDS, LONGEST_FIELD, LONGEST_TEXT = 32, 64, 256
"""Of a record's other fields: how many are kept, and how long their names and texts may be."""
_DEEPEST = 4
_LARGEST = 1 << 63
_UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""A number of time from so much on is in such parts of a second; below, in seconds."""
_LATEST = 253_402_300_800.0
"""The year 10000, in which no device reports."""
_MISSING = object()
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})", re.ASCII)
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?(e[-+]?[0-9]{1,2})?", re.ASCII)
_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(slots=True)
class Record:
    """One record as it came: nothing about it is believed yet.

    Without `y` it is a sample that waits for its label; without `x`, the label of another record.
    """

    x: Any = None
    y: Any = None
    id: Any = None
    time: Any = None
    """The record's own time: ISO 8601 text, or seconds, milliseconds ... since 1970."""
    fields: dict[str, Scalar] = field(default_factory=dict)
    """Its other numbers, texts and flags, by name; those of a table within it by `table.name`."""


class FieldNames:
    """Finds the parts of a record by the names that its sender gave them.

    Parameters
    ----------
    names : mapping
        For `x`, `y`, `id` and `time` the path to it: keys, and places in lists, apart by dots.

    Raises
    ------
    ValueError
        If a key is none of these, or a path is empty.

    Examples
    --------
    >>> names = FieldNames({"x": "payload.values", "y": "state"})
    >>> record = names.take({"payload": {"values": [1, 2], "gain": 3}, "state": "ok", "unit": "V"})
    >>> record.x, record.y, record.fields
    ([1, 2], 'ok', {'payload.gain': 3, 'unit': 'V'})
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        given = dict(names or {})
        for name, path in given.items():
            if name not in NAMES:
                raise ValueError(f"fields are {', '.join(NAMES)}, not '{name}'")
            if not all(path.split(".")):
                raise ValueError(f"fields.{name} must be a name, or names apart by dots: '{path}'")
        paths = {name: given.get(name, name) for name in NAMES}
        if len(set(paths.values())) < len(paths):
            raise ValueError("fields must name four different places")
        self._paths = {name: tuple(path.split(".")) for name, path in paths.items()}
        self._taken = frozenset(paths.values())
        self._flat = tuple(paths.values()) if all(map(_is_name, paths.values())) else None
        """The names, where none is a path."""

    def parse_json(self, line: bytes) -> Record | None:
        """Return the record of one JSON text; None if it is none, however deep, long or broken."""
        try:
            return self.take(_decoder.decode(line))
        except (msgspec.DecodeError, ValueError, RecursionError, MemoryError):
            return None

    def take_texts(self, fields: Mapping[str, str], payload: bytes) -> Record | None:
        """Return the record of a file, of which texts beside it say the rest."""
        table = {name: typed(text) for name, text in fields.items()}
        label = fields.get(".".join(self._paths["y"]))
        if label in ("true", "false"):  # which is a label's name here, and no flag
            table[".".join(self._paths["y"])] = label
        return self.take_file(table, payload)

    def take_file(self, fields: Mapping[str, Any], payload: bytes, y: Any = None) -> Record | None:
        """Return the record of a file, of which a table beside it says the rest.

        `y` is its label where the table names none.
        """
        found = self.take({**fields, "x": payload})
        if found is None:
            return None
        return replace(found, x=payload, y=y if found.y is None else found.y)

    def take(self, table: Mapping[str, Any]) -> Record | None:
        """Return the record of a table; None where it is neither a sample nor another's label."""
        if self._flat is None:
            found = [_at(table, self._paths[name]) for name in NAMES]
            x, y, id_, time = (None if value is _MISSING else value for value in found)
        else:
            x, y, id_, time = map(table.get, self._flat)
        if not isinstance(x, list | str | bytes | None) or (x is None and None in (y, id_)):
            return None
        fields: dict[str, Scalar] = {}
        if self._flat is None or len(table) > sum(map(table.__contains__, self._flat)):
            _collect(table, "", self._taken, fields, _DEEPEST)
        return Record(x, y, id_, time, fields)


def typed(text: str) -> Scalar:
    """Return what a text without types stands for: a number or a flag, where it is written as one.

    >>> typed("7"), typed("-0.5"), typed("true"), typed("007"), typed("nan")
    (7, -0.5, True, '007', 'nan')
    """
    if text in ("true", "false"):
        return text == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


def own_time(raw: Any) -> float:
    """Return a record's own time in seconds since 1970; NaN where it says none.

    A text without a zone is taken for UTC. Numbers are seconds, or from 1e11 on milliseconds,
    microseconds, nanoseconds.

    >>> own_time("2026-03-01T12:00:00Z"), own_time(1772366400000), own_time("yesterday")
    (1772366400.0, 1772366400.0, nan)
    """
    if isinstance(raw, str) and len(raw) <= LONGEST_FIELD:
        try:
            found = datetime.fromisoformat(raw.strip())
            zoned = found if found.tzinfo else found.replace(tzinfo=UTC)
            return zoned.timestamp()
        except (ValueError, OverflowError):
            return math.nan
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not abs(raw) < _LARGEST:
        return math.nan
    seconds = float(raw)
    for least, unit in _UNITS:
        if seconds >= least:
            seconds *= unit
            break
    return seconds if 0 < seconds < _LATEST else math.nan


def known_fields(given: Any) -> dict[str, Scalar]:
    """Return the scalars of a table from outside, in bounded number and length.

    >>> known_fields({"unit": "V", "deep": {"a": 1}, "list": [1], 7: 1})
    {'unit': 'V', 'deep.a': 1}
    """
    fields: dict[str, Scalar] = {}
    if isinstance(given, Mapping):
        _collect(given, "", frozenset(), fields, _DEEPEST)
    return fields


def _at(table: Any, path: tuple[str, ...]) -> Any:
    """Return what stands at a path, or that nothing does."""
    for part in path:
        if isinstance(table, Mapping):
            table = table.get(part, _MISSING)
        elif isinstance(table, list) and part.isdecimal() and int(part[:9]) < len(table):
            table = table[int(part[:9])]
        else:
            return _MISSING
    return table


def _is_name(path: str) -> bool:
    return "." not in path


def _is_short(value: Any) -> bool:
    """Whether a value is a scalar of bounded size."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < _LARGEST
    return isinstance(value, bool | float) or (
        isinstance(value, str) and len(value) <= LONGEST_TEXT
    )


def _collect(
    table: Mapping[Any, Any],
    prefix: str,
    taken: frozenset[str],
    fields: dict[str, Scalar],
    depth: int,
) -> None:
    """Add the scalars of a table, and of tables within it, that are not among the taken paths."""
    for key, value in table.items():
        if len(fields) >= MOST_FIELDS:
            return
        if not isinstance(key, str) or len(prefix) + len(key) > LONGEST_FIELD:
            continue
        name = prefix + key
        if name in taken:
            continue
        if isinstance(value, Mapping):
            if depth > 1:
                _collect(value, name + ".", taken, fields, depth - 1)
        elif _is_short(value):
            fields[name] = value
