"""`fedkeep provision`: the keys of a fleet, and the exact lines that start it."""

from pathlib import Path
from typing import Annotated

import typer


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
        typer.Option(help="A name or address of the key-holder of encrypted profiles; repeat for several."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Validity of the server's certificate.")] = 825,
) -> None:
    """Make the keys of a fleet, and print how to start it.

    A CA, the server's certificate and one key per device; for encrypted profiles also the certificates by which
    server and key-holder know each other.
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
        typer.echo("\n# on the key-holder, with ca.crt, keyholder.crt and keyholder.key copied to CREDENTIALS")
        typer.echo("fedkeep keyholder create KEYS")
        typer.echo(f"fedkeep keyholder serve KEYS --credentials CREDENTIALS --listen {key_holder[0]}:9600")
