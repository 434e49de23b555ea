"""`fedkeep fleet`: a first fleet on one machine, in one command each."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedkeep.deploy.first_fleet import FirstFleet

fleet = typer.Typer(
    help="Set up, start, look at and stop a fleet on this machine.", no_args_is_help=True, rich_markup_mode=None
)

Folder = Annotated[Path, typer.Argument(help="The fleet's folder.")]


@fleet.command()
def init(
    folder: Folder, devices: Annotated[int, typer.Option(min=2, max=50, help="How many devices it has.")] = 3
) -> None:
    """Write a fleet into a folder: its specification, keys, and a configuration for each device."""
    _fleet_in(folder).create(devices)
    typer.echo(
        f"{folder / 'fleet.toml'} says what the fleet does, {folder / 'devices'}/*/agent.toml what each device sees."
    )
    typer.echo(f"Start it with: fedkeep fleet start {folder}")


@fleet.command()
def start(
    folder: Folder,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The server's port.")] = 8000,
    page: Annotated[int, typer.Option(min=1, max=65535, help="The page's port.")] = 8377,
) -> None:
    """Start server, devices and page; they run until `fedkeep fleet stop`, and go on where they were."""
    pid = _fleet_in(folder).start(port, page)
    typer.echo(f"The fleet runs as process {pid}. Watch it at http://127.0.0.1:{page}")


@fleet.command()
def status(folder: Folder) -> None:
    """Say which processes run, and how far the fleet is."""
    from fedkeep.core.errors import DataError
    from fedkeep.records import Members, read_run

    known = _fleet_in(folder)
    devices, running = known.devices(), known.running()
    for name in ("fleet", "server", "page", *(f"{kind}-{n}" for n in devices for kind in ("agent", "node"))):
        typer.echo(f"{name:9} {running.get(name, 'not running')}")
    try:
        run = read_run(known.root / "records" / "fleet.jsonl")
    except DataError:
        typer.echo("round     none yet")
        return
    accuracy = [e.accuracy for e in run.evaluations if e.accuracy is not None]
    reached = f", accuracy {accuracy[-1]:.3f}" if accuracy else ""
    typer.echo(f"round     {run.rounds[-1].round if run.rounds else 0}{reached}")
    for line in run.of(Members)[-1:]:
        online = sum(member.online for member in line.members)
        typer.echo(f"devices   {online} of {len(line.members)} online when the server last looked")


@fleet.command()
def stop(folder: Folder) -> None:
    """Stop what `start` started, by its process number; stores, keys and the run's state stay."""
    stopped = _fleet_in(folder).stop()
    typer.echo("Stopped." if stopped else "It was not running.")


def _fleet_in(folder: Path) -> "FirstFleet":
    from fedkeep.deploy.first_fleet import FirstFleet

    return FirstFleet(folder.resolve())
