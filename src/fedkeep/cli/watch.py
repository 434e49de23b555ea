"""`fedkeep watch`: the live page."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.web.server import PORT, LiveServer


def watch(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR_OR_URL", help="A directory of runs, or another watch's address."
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FEDKEEP_TOKEN", help="Secret that a visitor must know.", show_envvar=True
        ),
    ] = None,
) -> None:
    """Show runs live in the browser."""
    from fedkeep.deploy.services import troubles

    folder = Path(source).absolute().parent  # where a fleet's supervisor notes its processes
    server = LiveServer(source, host, port, token, partial(troubles, folder))
    typer.echo(f"Watching {source} at {server.url} (Ctrl-C stops)")
    server.run()
