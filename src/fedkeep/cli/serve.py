"""`fedkeep serve`: a Flower server that survives `kill -9`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    app: Annotated[Path, typer.Argument(help="The Flower app: a directory with its pyproject.toml.", exists=True)],
    credentials: Annotated[Path, typer.Option(help="What `fedkeep provision` made.")],
    host: Annotated[str, typer.Option(help="The name or address by which devices reach this server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The SuperLink's port.")] = 8000,
    bind: Annotated[str | None, typer.Option(help="The address to listen on, if it is not the host.")] = None,
    state: Annotated[str | None, typer.Option(help="A file or postgresql://...; default: in the credentials.")] = None,
    run: Annotated[str, typer.Option(help="The name under which the run is saved.")] = "default",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the saved run of that name.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys: loopback only.")] = False,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the app's run config, as key=value; repeat for more.")
    ] = None,
) -> None:
    """Serve a fleet by Flower, and go on after a crash.

    Starts a SuperLink, runs the app on it, and resumes the run if it dies.
    """
    import logging

    from fedkeep.config import override
    from fedkeep.core.errors import ConfigError
    from fedkeep.flower.deployment import Deployment
    from fedkeep.flower.serving import serve as serve_app

    if not insecure and not (credentials / "server.crt").exists():
        raise ConfigError(f"there are no credentials in {credentials}: run `fedkeep provision {credentials}` first")
    deployment = Deployment(credentials.resolve(), host, port, insecure=insecure, bind=bind)
    saved = state or str((credentials / "state.db").resolve())
    settings = {"state.url": saved, "state.run": run} | _flat(override({}, setting or []))
    logging.basicConfig(format="fedkeep: %(message)s")
    logging.getLogger("fedkeep").setLevel(logging.INFO)
    serve_app(deployment, app, settings, resume=resume)


def _flat(table: dict[str, object], prefix: str = "") -> dict[str, str | int | float | bool]:
    flat: dict[str, str | int | float | bool] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, (str, int, float, bool)):
            flat[f"{prefix}{key}"] = value
    return flat
