"""`fedkeep plan`: which labels each device of an operator's fleet should store."""

import json
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fedkeep.config import read_experiment
from fedkeep.core.coordination import Greedy, Plan
from fedkeep.core.errors import ConfigError
from fedkeep.core.fleet import Fleet
from fedkeep.planning import Exact, Profiles, read_profiles
from fedkeep.sim.assembly import assemble
from fedkeep.sim.experiment import expand
from fedkeep.web.distribution import distribution_svg

_ROWS_SHOWN = 50


def plan(
    file: Annotated[
        Path,
        typer.Argument(help="Profiles of the devices (.json, .csv), or an experiment (.toml).", show_default=False),
    ],
    clients_per_label: Annotated[
        int | None, typer.Option(help="The fewest devices that should store a label (default: 5, or the file's).")
    ] = None,
    labels_per_client: Annotated[
        int | None, typer.Option(help="The most labels a device stores (default: all it sees, or the file's).")
    ] = None,
    coordinator: Annotated[
        Literal["greedy", "exact"] | None, typer.Option(help="exact is optimal, for small fleets (default: greedy).")
    ] = None,
    quantities: Annotated[
        Literal["even", "frequent", "lp"] | None,
        typer.Option(help="How greedy divides a device's slots among its labels (default: even)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print quotas, weights and shortfalls as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw an experiment's devices, sizes and labels, as SVG.")
    ] = None,
) -> None:
    """Say which labels each device should store.

    How many samples of each it keeps, and what a sample of each counts in training.
    """
    if file.suffix.lower() == ".toml":
        if any(option is not None for option in (clients_per_label, labels_per_client, coordinator, quantities)):
            raise ConfigError(f"{file} says itself how to plan: change its [coordinator] instead of giving options")
        made, profiles = _of_experiment(file, plot)
    else:
        if plot is not None:
            raise ConfigError(f"--plot draws an experiment's data; {file} holds none")
        profiles = read_profiles(file)
        made = _of_profiles(profiles, clients_per_label, labels_per_client, coordinator, quantities)
    if as_json:
        said = {"quotas": made.quotas.tolist(), "label_weights": made.label_weights.tolist()}
        print(json.dumps({**said, "shortfalls": _sentences(made, profiles)}))
    else:
        _show(made, profiles)


def _of_profiles(
    profiles: Profiles, fewest: int | None, most: int | None, name: str | None, quantities: str | None
) -> Plan:
    """By the limits that are given, else the file's, else the default."""
    given = (limit for limit in (fewest, profiles.clients_per_label, Greedy.clients_per_label) if limit is not None)
    fewest, most = next(given, None), profiles.labels_per_client if most is None else most
    if name == "exact" and quantities is not None:
        raise ConfigError("the exact coordinator decides on quantities itself: leave out --quantities")
    try:
        chosen = Exact(fewest, most) if name == "exact" else Greedy(fewest, most, quantities or "even")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return chosen.plan(profiles.fleet)


def _of_experiment(file: Path, plot: Path | None) -> tuple[Plan, Profiles]:
    """The plan of the first coordinated run of an experiment, by the options in its file."""
    coordinated = [cell for cell in expand(read_experiment(file)) if cell.experiment.names["coordinator"] != "none"]
    if not coordinated:
        raise ConfigError(f"no run of {file} divides labels among devices: nothing to plan")
    parts = assemble(coordinated[0].experiment)
    data, made = parts.data, parts.server.plan
    if plot is not None:
        plot.write_text(distribution_svg(data), encoding="utf-8")
    assert made is not None
    names = data.label_names if len(made.holders) == data.labels else tuple(map(str, range(len(made.holders))))
    fleet = Fleet.numbered([coordinated[0].experiment.storage.capacity] * data.devices, parts.velocities)
    return made, Profiles(fleet, tuple(map(data.device_name, range(data.devices))), names)


def _show(made: Plan, profiles: Profiles) -> None:
    console = Console()
    table = Table(title=f"{len(made.devices)} devices, {len(profiles.label_names)} labels: slots to keep")
    table.add_column("device")
    for name in profiles.label_names:
        table.add_column(name, justify="right")
    for name, row in zip(profiles.device_names[:_ROWS_SHOWN], made.quotas, strict=False):
        table.add_row(name, *(str(slots) if slots else "." for slots in row.tolist()))
    if len(made.devices) > _ROWS_SHOWN:
        table.add_row(f"+ {len(made.devices) - _ROWS_SHOWN} more")
    table.add_section()
    table.add_row("slots", *map(str, made.slots))
    table.add_row("holders", *map(str, made.holders))
    table.add_row("weight", *(f"{weight:.4g}" for weight in made.label_weights))
    console.width = max(
        console.width, Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    )
    console.print(table)
    console.print(_unheld(made, profiles), markup=False, highlight=False, soft_wrap=True)
    for sentence in _sentences(made, profiles):
        console.print(f"shortfall: {sentence}", markup=False, highlight=False, soft_wrap=True)


def _unheld(made: Plan, profiles: Profiles) -> str:
    """How much of the stream comes by on devices that do not hold its label: its weight goes to others."""
    velocities = profiles.fleet.velocities
    total = float(velocities.sum(dtype=np.float64))
    share = float(velocities[made.quotas == 0].sum(dtype=np.float64)) / total if total else 0.0
    return f"{share:.1%} of all arrivals have a label that their device does not hold."


def _sentences(made: Plan, profiles: Profiles) -> list[str]:
    return [shortfall.tell(profiles.label_names, profiles.device_names) for shortfall in made.shortfalls]
