"""A server that looks after itself: SuperLink, registered nodes, and a run that is resumed when it dies."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from fedkeep.core.errors import FedkeepError
from fedkeep.deploy.deployment import Deployment
from fedkeep.deploy.local_fleet import LocalFleet, resolved

log = logging.getLogger("fedkeep.flower")

Settings = Mapping[str, str | int | float | bool]
_PAUSE_SECONDS = 2.0


def serve(deployment: Deployment, app: Path, settings: Settings, *, resume: bool, restarts: int = 3) -> None:
    """Starts the SuperLink, submits the app and streams its log to its end; a run that dies is resumed.

    The SuperLink keeps its database and the run its state, so that after `kill -9` of everything the same call
    with `resume` finds the same nodes and the last whole round.
    """
    with LocalFleet(deployment) as fleet:
        fleet.start_superlink()
        if not deployment.insecure:
            fleet.register()
            log.info("the nodes are registered: start their SuperNodes")
        for attempt in range(restarts + 1):
            status = _follow(fleet, app, {**settings, "state.resume": resume or attempt > 0})
            if status == "finished:completed":
                return
            log.warning("the run ended as %s", status)
    raise FedkeepError(f"the run ended as {status} {restarts + 1} times: see {deployment.root}/superlink.log")


def _follow(fleet: LocalFleet, app: Path, settings: Settings) -> str:
    """Submits the app and shows its log until it has ended; returns how."""
    run = fleet.submit(app, settings)
    while True:
        subprocess.run(resolved(fleet.deployment.log(run)), env=fleet.environment(), check=False)
        status = fleet.status(run)
        if status.startswith("finished"):
            return status
        time.sleep(_PAUSE_SECONDS)
