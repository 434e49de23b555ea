"""The processes of a deployment on this machine, and a server that looks after itself.

It has a SuperLink, registered nodes, and a run that is resumed when it dies.
"""

import ctypes
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedkeep.core.errors import FedkeepError, MissingExtraError
from fedkeep.deploy.deployment import CONNECTION, Deployment

log = logging.getLogger("fedkeep.flower")

Settings = Mapping[str, str | int | float | bool]
_START_SECONDS, _RESTARTS = 60.0, 3
_REGISTERING = 4
"""Registrations at a time: each is a program of Flower's that takes seconds to start."""
_PORTS = range(20_000, 32_768)
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_DIE_WITH_PARENT = None if _PRCTL is None else partial(_PRCTL, 1, signal.SIGKILL)
"""PR_SET_PDEATHSIG: asks Linux to end a process with the one that started it, so that no SuperLink keeps a port."""


class LocalFleet:
    """Starts and stops the processes of a fleet; each leads its own group, so that none is left behind."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.environment = os.environ | program_environment() | deployment.environment()
        if shutil.which("flower-superlink", path=self.environment["PATH"]) is None:
            raise MissingExtraError("flower-superlink", "flower")
        self._begun: dict[str, float] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        deployment.root.mkdir(parents=True, exist_ok=True)
        deployment.write_connection()

    def __enter__(self) -> "LocalFleet":
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name)

    def start_superlink(self) -> None:
        """Starts the SuperLink and waits until it answers; refuses to go on when its port is taken."""
        deployment = self.deployment

        def answers() -> bool:
            with (
                suppress(OSError),
                socket.create_connection((deployment.bind or deployment.host, deployment.port), 1),
            ):
                return True
            return False

        if answers():
            raise FedkeepError(
                f"{deployment.address} is taken by another program: choose another port"
            )
        if not wait_until(answers, _START_SECONDS, self.start("superlink", deployment.superlink())):
            why = self.log("superlink")[-500:]
            raise FedkeepError(f"the SuperLink did not start on {deployment.address}: {why}")

    def register(self) -> None:
        """Registers every node's key with the running SuperLink; one that is registered stays so."""
        commands = [self.deployment.register(name) for name in self.deployment.credentials.nodes()]
        with ThreadPoolExecutor(_REGISTERING) as pool:
            list(pool.map(partial(self.call, may_fail=True), commands))

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a process that ends with the fleet; its output goes to NAME.log."""
        with (self.deployment.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self.environment | dict(environment or {}),
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_DIE_WITH_PARENT,  # noqa: PLW1509 - a single system call
            )
        self.processes[name], self._begun[name] = process, time.monotonic()
        return process

    def submit(self, app: Path, config: Settings) -> str:
        return str(self._told(self.deployment.run(app, config))["run-id"])

    def status(self, run: str) -> str:
        """The status of a run, e.g. `running` or `finished:completed`."""
        return str(self._told(["flwr", "list", CONNECTION, "--run-id", run])["runs"][0]["status"])

    def _told(self, command: Sequence[str]) -> Any:
        said = self.call(
            [*command, "--format", "json"]
        )  # which a line about the SuperLink goes before
        return json.loads(said[said.index("{") : said.rindex("}") + 1])

    def call(
        self, command: Sequence[str], timeout: float = 120.0, *, may_fail: bool = False
    ) -> str:
        """Runs one of Flower's commands to its end and returns what it printed."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        printed = done.stdout + done.stderr
        if done.returncode and not may_fail:
            said = f"`{' '.join(command[:3])}` failed: {printed[-800:]}"
            link = self.processes.get("superlink")
            if link is not None and link.poll() is not None:
                said += (
                    f"\nthe SuperLink has ended ({link.returncode}): {self.log('superlink')[-500:]}"
                )
            raise FedkeepError(said)
        return printed

    def is_due(self, name: str, pause: float) -> bool:
        """Whether a process is to be started: it never was, or it has ended and began that long ago."""
        process = self.processes.get(name)
        return process is None or (
            process.poll() is not None and time.monotonic() - self._begun[name] > pause
        )

    def kill(self, name: str) -> None:
        """kill -9 of a process and all below it; nothing if it is gone already.

        Flower gives the apps that it starts sessions of their own, so that no group has them all.
        """
        process = self.processes.pop(name, None)
        if process is None:
            return
        below: dict[int, list[int]] = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parent = int(status.read_text().rpartition(")")[2].split()[1])
                below.setdefault(parent, []).append(int(status.parent.name))
        family = [process.pid]
        for member in family:
            family += below.get(member, [])
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        return (self.deployment.root / f"{name}.log").read_text(errors="replace")


def serve(deployment: Deployment, app: Path, settings: Settings, *, resume: bool) -> None:
    """Starts the SuperLink, submits the app and streams its log to its end; a run that dies is resumed.

    The SuperLink keeps its database and the run its state, so that after `kill -9` of everything the same call
    with `resume` finds the same nodes and the last whole round.
    """
    with LocalFleet(deployment) as fleet:
        fleet.start_superlink()
        if not deployment.insecure:
            fleet.register()
            log.info("the nodes are registered: start their SuperNodes")
        for attempt in range(_RESTARTS + 1):
            status, run = "", fleet.submit(app, {**settings, "state.resume": resume or attempt > 0})
            while not status.startswith("finished"):
                shown = ["flwr", "log", run, CONNECTION, "--stream"]
                subprocess.run(shown, env=fleet.environment, check=False)
                status = fleet.status(run)
            if status == "finished:completed":
                return
            log.warning("the run ended as %s", status)
    raise FedkeepError(
        f"the run ended as {status} {_RESTARTS + 1} times: see {deployment.root}/superlink.log"
    )


def wait_until(
    happened: Callable[[], bool], seconds: float, process: subprocess.Popen[bytes] | None = None
) -> bool:
    """Waits until something has happened; False if it has not by then, or the process that would do it has ended."""
    end = time.monotonic() + seconds
    while (
        (alive := process is None or process.poll() is None)
        and not happened()
        and time.monotonic() < end
    ):
        time.sleep(0.1)
    return alive and happened()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, of those that no system hands out by itself while the program is starting."""
    for port in random.SystemRandom().sample(_PORTS, k=len(_PORTS)):
        with (
            socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe,
            suppress(OSError),
        ):
            probe.bind((host, port))
            return port
    raise FedkeepError(f"every port of {host} from {_PORTS.start} to {_PORTS.stop - 1} is taken")


def program_environment() -> dict[str, str]:
    """Paths by which Flower's programs, and what they start, come from this interpreter's environment."""
    programs = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    modules = os.pathsep.join(path for path in sys.path if path)
    return {"PATH": programs, "PYTHONPATH": modules}
