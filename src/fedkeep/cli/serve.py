"""`fedkeep serve`: a Flower server that survives `kill -9`."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    app: Annotated[
        Path, typer.Argument(help="A fleet.toml, or a Flower app: a directory with its pyproject.toml.", exists=True)
    ],
    credentials: Annotated[Path, typer.Option(help="What `fedkeep provision` made.")],
    host: Annotated[str, typer.Option(help="The name or address by which devices reach this server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The SuperLink's port.")] = 8000,
    bind: Annotated[str | None, typer.Option(help="The address to listen on, if it is not the host.")] = None,
    state: Annotated[str | None, typer.Option(help="A file or postgresql://...; default: in the credentials.")] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="Where the record goes that `fedkeep watch` follows; default: in the credentials."),
    ] = None,
    run: Annotated[str, typer.Option(help="The name under which the run is saved.")] = "default",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the saved run of that name.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys: loopback only.")] = False,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the fleet or of the app, as key=value; repeat for more.")
    ] = None,
) -> None:
    """Serve a fleet by Flower, and go on after a crash.

    Starts a SuperLink, runs the fleet's app on it, and resumes the run if it dies.
    """
    from fedkeep.config import merged, override
    from fedkeep.core.errors import ConfigError
    from fedkeep.deploy.deployment import Deployment
    from fedkeep.deploy.local_fleet import serve as serve_app
    from fedkeep.flower.server_app import make_app, show_log

    if not insecure and not (credentials / "server.crt").exists():
        raise ConfigError(f"there are no credentials in {credentials}: run `fedkeep provision {credentials}` first")
    root = credentials.resolve()
    deployment = Deployment(root, host, port, insecure=insecure, bind=bind)
    ours = {
        "state": {"url": state or str(root / "state.db"), "run": run},
        "records": {"directory": str(root / "records")},
    }
    asked = {} if records is None else {"records": {"directory": str(records.resolve())}}
    app, config = make_app(app, root / "app", merged(asked, override({}, setting or [])), ours)
    show_log()
    serve_app(deployment, app, config, resume=resume)
