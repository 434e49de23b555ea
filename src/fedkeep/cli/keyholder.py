"""`fedkeep keyholder`: the party that alone can decrypt profiles, and makes plans of them."""

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

keyholder = typer.Typer(
    help="Hold the key of encrypted profiles, and plan from them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Directory = Annotated[Path, typer.Argument(help="The key-holder's directory.")]


@keyholder.command()
def create(directory: Directory) -> None:
    """Make fresh keys, and say what to give to the devices.

    The secret key stays in the directory, for its owner's eyes only. Nothing replaces it once it is
    lost.
    """
    from fedkeep.keyholder.sealing import create_key

    create_key(directory)
    show(directory)


@keyholder.command()
def show(directory: Directory) -> None:
    """Say again what to give to the devices."""
    from fedkeep.keyholder.sealing import open_key, public_half

    key = public_half(open_key(directory)).hex()
    typer.echo(
        "# for the agent's configuration on every device; "
        "the server must not be the one who brings it there"
    )
    typer.echo(f'[privacy]\nencrypted_profiles = true\npublic_key = "{key}"')


@keyholder.command()
def serve(
    directory: Directory,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0 takes a free one.")
    ] = "127.0.0.1:9600",
    credentials: Annotated[
        Path | None,
        typer.Option(help="ca.crt, keyholder.crt and keyholder.key, made by `fedkeep provision`."),
    ] = None,
    least_devices: Annotated[
        int,
        typer.Option(min=1, help="Make no plan for fewer devices: its totals would tell of each."),
    ] = 3,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no certificates: loopback only.")
    ] = False,
) -> None:
    """Answer the server's sealed profiles with plans, until stopped.

    Only the server, known by its certificate, gets an answer, and what it gets is the plan.
    """
    from fedkeep.core.errors import ConfigError
    from fedkeep.keyholder.sealing import open_key
    from fedkeep.keyholder.service import KeyService, secured
    from fedkeep.protocol.addresses import Address

    if insecure == (credentials is not None):
        raise ConfigError("say --credentials DIR, or --insecure on loopback, and not both")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    tls = None if credentials is None else secured(credentials, "keyholder")
    service = KeyService(open_key(directory), Address.parse(listen), tls, least_devices)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    typer.echo(f"listening on {service.address}")
    try:
        service.run()
    except KeyboardInterrupt:
        service.close()
