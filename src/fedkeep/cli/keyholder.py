"""`fedkeep keyholder`: the party that alone can decrypt, and only ever decrypts what a plan needs."""

import logging
import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

keyholder = typer.Typer(
    help="Hold the key of encrypted profiles, and plan from them.", no_args_is_help=True, rich_markup_mode=None
)

Directory = Annotated[Path, typer.Argument(help="The key-holder's directory.")]


@keyholder.command()
def create(
    directory: Directory,
    scheme: Annotated[
        Literal["full", "coarse"],
        typer.Option(
            help="full: velocities 0.5 % apart are told apart; coarse: a factor of 1.6, for a tenth of the work."
        ),
    ] = "full",
) -> None:
    """Make fresh keys, and say what to give to the devices.

    The secret keys stay in the directory, for their owner's eyes only. Nothing replaces them once they are lost.
    """
    from fedkeep.keyholder.ckks import SCHEMES
    from fedkeep.keyholder.parties import KeyDirectory

    keys = KeyDirectory(directory.resolve())
    public = keys.create(SCHEMES[scheme])
    typer.echo(_settings(keys.for_devices, public.name.hex()))


@keyholder.command()
def show(directory: Directory) -> None:
    """Say again what to give to the devices."""
    from fedkeep.keyholder.parties import KeyDirectory

    keys = KeyDirectory(directory.resolve())
    typer.echo(_settings(keys.for_devices, keys.public().name.hex()))


@keyholder.command()
def serve(
    directory: Directory,
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes a free one.")] = "127.0.0.1:9600",
    credentials: Annotated[
        Path | None, typer.Option(help="ca.crt, keyholder.crt and keyholder.key, made by `fedkeep provision`.")
    ] = None,
    least_devices: Annotated[
        int, typer.Option(min=1, help="Make no plan for fewer devices: their totals would tell of each.")
    ] = 3,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no certificates: loopback only.")] = False,
) -> None:
    """Answer the server's tables with plans, until stopped.

    Only the server, known by its certificate, gets an answer. Signs and totals are decrypted, velocities never.
    """
    from fedkeep.core.errors import ConfigError
    from fedkeep.keyholder.parties import KeyDirectory
    from fedkeep.keyholder.port import keyholder_side
    from fedkeep.keyholder.service import KeyService
    from fedkeep.link.addresses import Address

    if insecure == (credentials is not None):
        raise ConfigError("say --credentials DIR, or --insecure on loopback, and not both")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    tls = None if credentials is None else keyholder_side(credentials)
    service = KeyService(KeyDirectory(directory.resolve()), Address.parse(listen), tls, least_devices)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    typer.echo(f"listening on {service.address}")
    try:
        service.run()
    except KeyboardInterrupt:
        service.close()


def _settings(path: Path, digest: str) -> str:
    return (
        f"# copy {path} to every device, and write into its agent's configuration\n"
        f'[privacy]\nencrypted_profiles = true\npublic_context = "{path.name}"\ncontext_digest = "{digest}"'
    )
