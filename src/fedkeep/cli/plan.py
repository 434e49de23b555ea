"""`fedkeep plan`: which labels each device of an operator's fleet should store."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fedkeep.config.experiment import expand, read_experiment
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.planning.greedy import COORDINATORS
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FASTEST, FleetProfiles
from fedkeep.loading import find_component
from fedkeep.sim.assembly import assemble
from fedkeep.tables import build

Names: TypeAlias = tuple[str, ...]
_ROWS_SHOWN = 50
_LARGEST = 2**31


class Profiles(msgspec.Struct, forbid_unknown_fields=True):
    """A fleet as an operator's file has it, and limits if it holds any."""

    capacity: list[int]
    velocity: list[list[float]]
    clients_per_label: int | None = None
    labels_per_client: int | None = None


def plan(
    file: Annotated[
        Path,
        typer.Argument(
            help="Profiles of the devices (.json, .csv), or an experiment (.toml).",
            show_default=False,
        ),
    ],
    clients_per_label: Annotated[
        int | None,
        typer.Option(
            max=_LARGEST,
            help="The fewest devices that should store a label (default: 5, or the file's).",
        ),
    ] = None,
    labels_per_client: Annotated[
        int | None,
        typer.Option(
            max=_LARGEST,
            help="The most labels a device stores (default: all it sees, or the file's).",
        ),
    ] = None,
    coordinator: Annotated[
        Literal["greedy", "paper-greedy", "exact"] | None,
        typer.Option(
            help="Who plans: our greedy (default), the paper's Algorithm 1 to the letter, or the "
            "optimum of its Eq. 9 (`fedkeep[plan]`)."
        ),
    ] = None,
    quantities: Annotated[
        Literal["even", "frequent"] | None,
        typer.Option(
            help="How `greedy` divides a device's slots among its labels (default: even)."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print quotas, weights and shortfalls as JSON.")
    ] = False,
) -> None:
    """Say which labels each device should store.

    How many samples of each it keeps, and what a sample of each counts in training.
    """
    if file.suffix.lower() == ".toml":
        given = (clients_per_label, labels_per_client, coordinator, quantities)
        if any(option is not None for option in given):
            raise ConfigError(
                f"{file} says itself how to plan: "
                "change its [coordinator] instead of giving options"
            )
        made, fleet, devices, labels = _of_experiment(file)
    else:
        profiles, devices, labels = read_profiles(file)
        fleet = FleetProfiles.numbered(profiles.capacity, profiles.velocity)
        fewest = profiles.clients_per_label if clients_per_label is None else clients_per_label
        most = profiles.labels_per_client if labels_per_client is None else labels_per_client
        limits = {"clients_per_label": fewest, "labels_per_client": most, "quantities": quantities}
        chosen = {key: value for key, value in limits.items() if value is not None}
        kind = find_component(COORDINATORS, coordinator or "greedy")
        made = build(kind, chosen, "coordinator").plan(fleet)
    shortfalls = [shortfall.tell(labels, devices) for shortfall in made.shortfalls]
    if as_json:
        table = {"quotas": made.quotas.tolist(), "label_weights": made.label_weights.tolist()}
        print(json.dumps({**table, "shortfalls": shortfalls}))
    else:
        _show(made, fleet, devices, labels, shortfalls)


def read_profiles(path: Path) -> tuple[Profiles, Names, Names]:
    r"""Read the profiles in a `.json` or `.csv` file, with names of devices and labels.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "fleet.csv")
    ...     _ = file.write_text("device,capacity,walking,sitting\npump,4,0.5,2\ndoor,2,0,1\n")
    ...     found, devices, labels = read_profiles(file)
    >>> devices, labels, found.velocity
    (('pump', 'door'), ('walking', 'sitting'), [[0.5, 2.0], [0.0, 1.0]])
    """
    if path.suffix.lower() not in (".json", ".csv"):
        raise DataError(
            f"{path}: profiles are read from a .json or .csv file, experiments from .toml"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            return _checked(*_read_csv(text))
        found = msgspec.convert(json.loads(text, object_pairs_hook=_without_twins), Profiles)
        counts = len(found.capacity), len(found.velocity[0]) if found.velocity else 0
        return _checked(found, *(tuple(map(str, range(count))) for count in counts))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: is not valid JSON: {error}") from error
    except msgspec.ValidationError as error:
        raise DataError(
            f"{path}: {error}; the keys are {', '.join(Profiles.__struct_fields__)}"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; a key that is there twice would silently lose its first value."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"the key '{key}' is there {count} times")
    return dict(pairs)


def _read_csv(text: str) -> tuple[Profiles, Names, Names]:
    rows = [row for row in csv.reader(text.splitlines()) if row]
    header = [cell.strip() for cell in rows[0]] if rows else []
    if header[:2] != ["device", "capacity"] or len(header) < 3:
        raise ValueError("the first line must be 'device,capacity' and one column for each label")
    names, labels = tuple(row[0].strip() for row in rows[1:]), tuple(header[2:])
    for kind, known in (("device", names), ("label", labels)):
        for name, count in Counter(known).items():
            if count > 1:
                raise ValueError(f"{kind} '{name}' is there twice")
            if not name:
                raise ValueError(f"a {kind} has no name")
    numbers: list[Any] = [[_number(cell, row[0]) for cell in row[1:]] or [0.0] for row in rows[1:]]
    return Profiles([row[0] for row in numbers], [row[1:] for row in numbers]), names, labels


def _number(cell: str, device: str) -> float:
    try:
        return float(cell)
    except ValueError as error:
        raise ValueError(f"device {device}: '{cell}' is not a number") from error


def _checked(found: Profiles, names: Names, labels: Names) -> tuple[Profiles, Names, Names]:
    if not names:
        raise ValueError("there is no device in it")
    if len(found.velocity) != len(names):
        raise ValueError(
            f"{len(names)} capacities but {len(found.velocity)} rows of velocity; "
            "each device needs both"
        )
    if not labels:
        raise ValueError("there is no label in it: velocity needs a column for each")
    for name, capacity, row in zip(names, found.capacity, found.velocity, strict=True):
        if len(row) != len(labels):
            raise ValueError(
                f"device {name} has {len(row)} velocities, but there are {len(labels)} labels"
            )
        if not (1 <= capacity < _LARGEST and capacity % 1 == 0):
            raise ValueError(
                f"device {name}: capacity must be a whole number of at least 1, got {capacity:g}"
            )
        if not all(0 <= rate <= FASTEST for rate in row):
            raise ValueError(f"device {name}: velocities must be finite numbers of at least 0")
    return found, names, labels


def _of_experiment(file: Path) -> tuple[Plan, FleetProfiles, Names, Names]:
    """Plan for the first coordinated run of an experiment file."""
    coordinated = [
        cell
        for cell in expand(read_experiment(file))
        if cell.experiment.names["coordinator"] != "none"
    ]
    if not coordinated:
        raise ConfigError(f"no run of {file} divides labels among devices: nothing to plan")
    parts = assemble(coordinated[0].experiment)
    data, made = parts.data, parts.server.plan
    assert made is not None
    names = (
        data.label_names
        if len(made.holders) == data.labels
        else tuple(map(str, range(len(made.holders))))
    )
    capacities = [parts.stored_slots(device) for device in range(data.devices)]
    fleet = FleetProfiles.numbered(capacities, parts.velocities)
    return made, fleet, tuple(map(data.device_name, range(data.devices))), names


def _show(
    made: Plan, fleet: FleetProfiles, devices: Names, labels: Names, shortfalls: list[str]
) -> None:
    """Print the plan, and how much of the stream arrives where its label is not held."""
    console = Console()
    table = Table(title=f"{len(made.devices)} devices, {len(labels)} labels: slots to keep")
    table.add_column("device")
    for name in labels:
        table.add_column(name, justify="right")
    for name, row in zip(devices[:_ROWS_SHOWN], made.quotas, strict=False):
        table.add_row(name, *(str(slots) if slots else "." for slots in row.tolist()))
    if len(made.devices) > _ROWS_SHOWN:
        table.add_row(f"+ {len(made.devices) - _ROWS_SHOWN} more")
    table.add_section()
    table.add_row("slots", *map(str, made.slots))
    table.add_row("holders", *map(str, made.holders))
    table.add_row("weight", *(f"{weight:.4g}" for weight in made.label_weights))
    widest = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, widest)
    console.print(table)
    total, unheld = (
        float(v.sum(dtype=np.float64))
        for v in (fleet.velocities, fleet.velocities[made.quotas == 0])
    )
    lost = unheld / (total or 1.0)
    unheld_share = f"{lost:.1%} of all arrivals have a label that their device does not hold."
    for sentence in (unheld_share, *(f"shortfall: {shortfall}" for shortfall in shortfalls)):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
