"""An operator's own profiles: what each device can store and how fast it sees each label, from JSON or CSV."""

import csv
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedkeep.core.errors import DataError, RefusedError
from fedkeep.core.fleet import FASTEST, Fleet

_LARGEST = 2**31


@dataclass(frozen=True, eq=False)
class Profiles:
    """A fleet with the names the operator gave, and limits if the file holds any."""

    fleet: Fleet
    device_names: tuple[str, ...]
    label_names: tuple[str, ...]
    clients_per_label: int | None = None
    labels_per_client: int | None = None


class _JsonProfiles(msgspec.Struct, forbid_unknown_fields=True):
    capacity: list[int]
    velocity: list[list[float]]
    clients_per_label: int | None = None
    labels_per_client: int | None = None


def read_profiles(path: Path) -> Profiles:
    """The profiles in a `.json` or `.csv` file; a mistake in it is named in one sentence.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "fleet.csv")
    ...     _ = file.write_text("device,capacity,walking,sitting\\npump,4,0.5,2\\ndoor,2,0,1\\n")
    ...     found = read_profiles(file)
    >>> found.device_names, found.label_names, found.fleet.velocities.tolist()
    (('pump', 'door'), ('walking', 'sitting'), [[0.5, 2.0], [0.0, 1.0]])
    """
    readers = {".json": _read_json, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: profiles are read from a .json or .csv file, experiments from .toml")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text") from error
    try:
        return readers[path.suffix.lower()](text)
    except (ValueError, RefusedError) as error:
        raise DataError(f"{path}: {error}") from error


def _read_json(text: str) -> Profiles:
    try:
        found = msgspec.convert(json.loads(text), _JsonProfiles)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; the keys are {', '.join(_JsonProfiles.__struct_fields__)}") from error
    names = tuple(str(device) for device in range(len(found.capacity)))
    labels = tuple(str(label) for label in range(len(found.velocity[0]) if found.velocity else 0))
    fleet = _fleet(found.capacity, found.velocity, names, labels)
    return Profiles(fleet, names, labels, found.clients_per_label, found.labels_per_client)


def _read_csv(text: str) -> Profiles:
    rows = [row for row in csv.reader(text.splitlines()) if row]
    header = [cell.strip() for cell in rows[0]] if rows else []
    if header[:2] != ["device", "capacity"] or len(header) < 3:
        raise ValueError("the first line must be 'device,capacity' and one column for each label")
    names = tuple(row[0].strip() for row in rows[1:])
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"device '{name}' is there twice")
    numbers = [[_number(cell, row[0]) for cell in row[1:]] for row in rows[1:]]
    capacities = [row[0] if row else 0 for row in numbers]
    return Profiles(
        _fleet(capacities, [row[1:] for row in numbers], names, tuple(header[2:])), names, tuple(header[2:])
    )


def _number(cell: str, device: str) -> float:
    try:
        return float(cell)
    except ValueError as error:
        raise ValueError(f"device {device}: '{cell}' is not a number") from error


def _fleet(capacities: list[Any], velocities: list[Any], names: tuple[str, ...], labels: tuple[str, ...]) -> Fleet:
    if not names:
        raise ValueError("there is no device in it")
    if len(velocities) != len(names):
        raise ValueError(f"{len(names)} capacities but {len(velocities)} rows of velocity; each device needs both")
    if not labels:
        raise ValueError("there is no label in it: velocity needs a column for each")
    for name, capacity, row in zip(names, capacities, velocities, strict=True):
        if len(row) != len(labels):
            raise ValueError(f"device {name} has {len(row)} velocities, but there are {len(labels)} labels")
        if not (1 <= capacity < _LARGEST and capacity % 1 == 0):
            raise ValueError(f"device {name}: capacity must be a whole number of at least 1, got {capacity:g}")
        if not all(0 <= rate <= FASTEST for rate in row):
            raise ValueError(f"device {name}: velocities must be finite numbers of at least 0")
    return Fleet.numbered(capacities, velocities)
