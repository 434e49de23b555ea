"""`fedkeep fleet`: a local fleet on one machine; `provision` and `serve`: one on many."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedkeep.deploy.first_fleet import FirstFleet
    from fedkeep.deploy.services import ServiceStatus

fleet = typer.Typer(
    help="Set up, start, look at and stop a fleet on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Folder = Annotated[Path, typer.Argument(help="The fleet's folder.")]


@fleet.command()
def init(
    folder: Folder,
    devices: Annotated[int, typer.Option(min=2, max=50, help="How many devices it has.")] = 3,
) -> None:
    """Write a fleet into a folder: its specification, keys, and a configuration for each device."""
    _fleet_in(folder).create(devices)
    typer.echo(
        f"{folder / 'fleet.toml'} says what the fleet does, "
        f"{folder / 'devices'}/*/agent.toml what each device sees."
    )
    typer.echo(f"Start it with: fedkeep fleet start {folder}")


@fleet.command()
def start(
    folder: Folder,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The server's port.")] = 8000,
    page: Annotated[int, typer.Option(min=1, max=65535, help="The page's port.")] = 8377,
) -> None:
    """Start server, devices and page, and return once the first round can open.

    They run until `fedkeep fleet stop`, and go on where they were. If no round can open, the reason
    is printed, nothing is left running, and the exit code is not zero.
    """
    known = _fleet_in(folder)
    _require_startable(known)
    services = known.start(port, page, lambda words: typer.echo(words, err=True))
    for name, service in services.items():
        if service.reason:
            typer.echo(f"{name} does not run as it should: {service.reason}", err=True)
    pid = services["fleet"].pid
    typer.echo(f"The fleet runs as process {pid}. Watch it at http://127.0.0.1:{page}")


@fleet.command()
def status(folder: Folder) -> None:
    """Say which processes run, how often they were started again, and how far the fleet is."""
    from fedkeep.deploy.services import low_disk

    known = _fleet_in(folder)
    devices, services = known.devices(), known.services()
    for name in (
        "fleet",
        "server",
        "superlink",
        *(["run"] if "run" in services else []),
        "page",
        *(["twin"] if known.twin.exists() else []),
        *(f"{kind}-{n}" for n in devices for kind in ("agent", "node")),
    ):
        typer.echo(f"{name:9} {_described(services.get(name))}")
    running = any(service.pid is not None for service in services.values())
    _print_progress(known, running=running)
    if (free := low_disk(known.root)) is not None:
        typer.echo(f"disk      FULL: {free >> 20} MB are free in {folder}; free some, it goes on")


@fleet.command()
def stop(folder: Folder) -> None:
    """Stop what `start` started, by its process number; stores, keys and the run's state stay."""
    typer.echo("Stopped." if _fleet_in(folder).stop() else "It was not running.")


@fleet.command()
def reset(folder: Folder) -> None:
    """Set aside model, record and stores, so that the next start begins anew.

    Needed after a change of labels, shape or model in fleet.toml. Keys and configurations stay.
    """
    aside = _fleet_in(folder).reset()
    typer.echo(f"What the fleet had learnt and stored is in {aside} now; delete it when you like.")


def _described(service: "ServiceStatus | None") -> str:
    if service is None:
        return "not running"
    words = "not running" if service.pid is None else str(service.pid)
    if service.restarts:
        times = "once" if service.restarts == 1 else f"{service.restarts} times"
        words += f", started again {times}"
    return f"{words}; it {service.reason}" if service.reason else words


def _print_progress(known: "FirstFleet", *, running: bool) -> None:
    """Print the round reached, who is online, and why devices' reports do not count."""
    from fedkeep.core.errors import DataError
    from fedkeep.records import read_run

    try:
        run = read_run(known.record)
    except DataError:
        typer.echo("round     none yet")
        return
    accuracy = [e.accuracy for e in run.evaluations if e.accuracy is not None]
    measure = "R2" if run.header.measure == "r2" else "accuracy"
    reached = f", {measure} {accuracy[-1]:.3f}" if accuracy else ""
    typer.echo(f"round     {run.rounds[-1].round if run.rounds else 0}{reached}")
    if (line := known.members()) is None:
        return
    online = sum(member.online for member in line.members)
    when = "when the server last looked" if running else "before it stopped"
    seen = max((m.seen for m in line.members if m.seen is not None), default=None)
    ago = f", {max(0, round(time.time() - seen))} s ago" if running and seen is not None else ""
    typer.echo(f"devices   {online} of {len(line.members)} online {when}{ago}")
    for member in line.members:
        if member.refused is not None:
            typer.echo(f"trouble   {member.name}'s reports do not count: {member.refused}")
        if member.silent:
            typer.echo(
                f"silent    {member.name}: nothing comes from {member.silent} of its sources"
            )
        if member.changes:
            typer.echo(f"changes   {member.name}'s stream has changed {member.changes} times")


def _require_startable(known: "FirstFleet") -> None:
    """Raise where fleet.toml is wrong, or no longer fits what was saved, or what devices have."""
    from fedkeep.agent.assembly import read_config
    from fedkeep.config.agreement import agreement_of
    from fedkeep.core.errors import ConfigError
    from fedkeep.core.regions import region_term
    from fedkeep.flower.server_app import check_specification, refuse_changes

    try:
        spec = check_specification(known.specification)
    except ConfigError as error:
        where = "" if str(known.specification) in str(error) else f"{known.specification}: "
        raise ConfigError(f"{where}{error}") from None
    refuse_changes(spec, str(known.state), "fleet", f"run `fedkeep fleet reset {known.root}`")
    terms = agreement_of(spec, region_term(spec.regions), spec.samples.numbers)
    wanted = {"samples.shape": spec.samples.shape, "samples.labels": spec.samples.count}
    wanted |= {"samples.targets": spec.samples.targets, "samples.edges": spec.samples.edges}
    wanted |= {"model": spec.model}
    for number in known.devices():
        path = known.home(number) / "agent.toml"
        try:
            config = read_config(path)
        except ConfigError as error:
            typer.echo(f"agent-{number} cannot start: {path}: {error}", err=True)
            continue
        has = {"samples.shape": config.samples.shape, "samples.labels": config.samples.count}
        has |= {"samples.targets": config.samples.targets, "samples.edges": config.samples.edges}
        has |= {"model": config.model}
        own = agreement_of(config.method, region_term(config.regions), config.samples.numbers)
        for ours, theirs in ((wanted, has), (terms, own)):
            for key in sorted(ours.keys() | theirs.keys()):
                if ours.get(key) != theirs.get(key):
                    raise ConfigError(
                        f"{key} is {ours.get(key)} in {known.specification} and "
                        f"{theirs.get(key)} in {path}: make them the same"
                    )


def _fleet_in(folder: Path) -> "FirstFleet":
    from fedkeep.deploy.first_fleet import FirstFleet

    return FirstFleet(folder.resolve())


def provision(
    directory: Annotated[Path, typer.Argument(help="Where the keys go; existing ones are kept.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address of the server; repeat for several, first is shown."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="How many devices need a key.")] = 2,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The SuperLink's port.")] = 8000,
    key_holder: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address of the key-holder of encrypted profiles; repeat for several."
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Validity of the server's certificate.")] = 825,
) -> None:
    """Make the keys of a fleet, and print how to start it.

    A CA, the server's certificate and one key per device; for encrypted profiles also the
    certificates by which server and key-holder know each other.
    """
    from fedkeep.deploy.credentials import provision as make_credentials
    from fedkeep.deploy.deployment import Deployment

    hosts = host or ["127.0.0.1", "localhost"]
    names = [f"node-{number}" for number in range(nodes)]
    root = directory.resolve()
    make_credentials(root, hosts, names, days, key_holder or ())
    deployment = Deployment(root, hosts[0], port)
    deployment.write_connection()
    typer.echo(deployment.instructions(names))
    if key_holder:
        typer.echo(
            "\n# on the key-holder, with ca.crt, keyholder.crt and keyholder.key "
            "copied to CREDENTIALS"
        )
        typer.echo("fedkeep keyholder create KEYS")
        typer.echo(
            f"fedkeep keyholder serve KEYS --credentials CREDENTIALS --listen {key_holder[0]}:9600"
        )


def serve(
    app: Annotated[
        Path,
        typer.Argument(
            help="A fleet.toml, or a Flower app: a directory with its pyproject.toml.", exists=True
        ),
    ],
    credentials: Annotated[Path, typer.Option(help="What `fedkeep provision` made.")],
    host: Annotated[
        str, typer.Option(help="The name or address by which devices reach this server.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The SuperLink's port.")] = 8000,
    bind: Annotated[
        str | None, typer.Option(help="The address to listen on, if it is not the host.")
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="A file or postgresql://...; default: in the credentials.")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            help="Where the record goes that `fedkeep watch` follows; default: in the credentials."
        ),
    ] = None,
    run: Annotated[str, typer.Option(help="The name under which the run is saved.")] = "default",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the saved run of that name.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no keys: loopback only.")
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A key of the fleet or of the app, as key=value; repeat for more."
        ),
    ] = None,
) -> None:
    """Serve a fleet by Flower, and go on after a crash.

    Starts a SuperLink, runs the fleet's app on it, and resumes the run if it dies.
    """
    from fedkeep.config.experiment import override
    from fedkeep.core.errors import ConfigError
    from fedkeep.deploy.deployment import Deployment
    from fedkeep.deploy.local_fleet import serve as serve_app
    from fedkeep.flower.server_app import make_app, refuse_saved_changes, show_log
    from fedkeep.tables import merged

    if not insecure and not (credentials / "server.crt").exists():
        raise ConfigError(
            f"there are no credentials in {credentials}: "
            f"run `fedkeep provision {credentials}` first"
        )
    root = credentials.resolve()
    deployment = Deployment(root, host, port, insecure=insecure, bind=bind)
    ours = {
        "state": {"url": state or str(root / "state.db"), "run": run},
        "records": {"directory": str(root / "records")},
    }
    asked = {} if records is None else {"records": {"directory": str(records.resolve())}}
    app, config = make_app(app, root / "app", merged(asked, override({}, setting or [])), ours)
    show_log()
    if resume:
        refuse_saved_changes(app, config, "begin another run by --run NAME")
    serve_app(deployment, app, config, resume=resume)
