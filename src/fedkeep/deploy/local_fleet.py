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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedkeep.core.errors import FedkeepError, MissingExtraError
from fedkeep.deploy.deployment import CONNECTION, Deployment, Serving
from fedkeep.deploy.ports import listeners, require_free

log = logging.getLogger("fedkeep.flower")

Settings = Mapping[str, str | int | float | bool]
_START_SECONDS, _RESTARTS = 180.0, 3
_SETTLED_SECONDS = 600.0
"""A run that lasted longer before it ended is no failure in a row."""
_REGISTERING = 4
"""Registrations at a time: each is a program of Flower's that takes seconds to start."""
_PORTS = range(20_000, 32_768)
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_DIE_WITH_PARENT = None if _PRCTL is None else partial(_PRCTL, 1, signal.SIGKILL)
"""PR_SET_PDEATHSIG: Linux ends a process with its parent, so that no SuperLink keeps a port."""


class LocalFleet:
    """Starts and stops the processes of a fleet; each leads a group, so none is left behind."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.environment = os.environ | program_environment() | deployment.environment()
        if shutil.which("flower-superlink", path=self.environment["PATH"]) is None:
            raise MissingExtraError("flower-superlink", "flower")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        deployment.root.mkdir(parents=True, exist_ok=True)
        deployment.write_connection()

    def __enter__(self) -> "LocalFleet":
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name)

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers.

        Raises
        ------
        ConfigError
            If its port is taken.
        FedkeepError
            If it ends, or another program got the port meanwhile.
        """
        deployment = self.deployment
        host, port = deployment.bind or deployment.host, deployment.port

        def answers() -> bool:
            with suppress(OSError), socket.create_connection((host, port), 1):
                return True
            return False

        require_free(port, "the SuperLink", "--port", host)
        process = self.start("superlink", deployment.superlink())
        if not wait_until(answers, _START_SECONDS, process):
            why = self.log("superlink")[-500:]
            raise FedkeepError(f"the SuperLink did not start on {deployment.address}: {why}")
        seen = listeners(port)
        if seen and not seen & set(family_of(process.pid)):
            raise FedkeepError(f"{deployment.address} was taken by process {min(seen)} meanwhile")

    def is_alive(self, name: str) -> bool:
        """Return whether a process that was started is running."""
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def register(self) -> None:
        """Register every node's key with the running SuperLink; a registered one stays so."""
        commands = [self.deployment.register(name) for name in self.deployment.credentials.nodes()]
        with ThreadPoolExecutor(_REGISTERING) as pool:
            list(pool.map(partial(self.call, may_fail=True), commands))

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process that ends with the fleet; its output goes to NAME.log."""
        with (self.deployment.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self.environment | dict(environment or {}),
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_DIE_WITH_PARENT,  # noqa: PLW1509 - a single system call
            )
        self.processes[name] = process
        return process

    def submit(self, app: Path, config: Settings) -> str:
        """Submit the app to the running SuperLink and return the run's number."""
        return str(self._answer(self.deployment.run(app, config))["run-id"])

    def status(self, run: str) -> str:
        """Return the status of a run, e.g. `running` or `finished:completed`.

        Raises
        ------
        FedkeepError
            If the SuperLink does not answer, or does not know the run.
        """
        runs = self._answer(["flwr", "list", CONNECTION, "--run-id", run]).get("runs")
        if not runs:
            raise FedkeepError(f"the SuperLink does not know run {run}")
        return str(runs[0]["status"])

    def _answer(self, command: Sequence[str]) -> Any:
        """Run a command of Flower's and return what it answers.

        It may end with success where it failed, and write a line about the SuperLink before.
        """
        printed = self.call([*command, "--format", "json"])
        words = " ".join(command[:2])
        try:
            answer = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
        except ValueError:
            raise FedkeepError(f"`{words}` failed: {printed[-800:]}") from None
        if not answer.get("success", True):
            why = answer.get("error-message") or answer.get("error_message") or printed[-800:]
            raise FedkeepError(f"`{words}` failed: {str(why).strip()}")
        return answer

    def call(
        self, command: Sequence[str], timeout: float = 120.0, *, may_fail: bool = False
    ) -> str:
        """Run one of Flower's commands to its end and return what it printed.

        Raises
        ------
        FedkeepError
            If the command fails, unless it may.
        """
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
            reason = f"`{' '.join(command[:3])}` failed: {printed[-800:]}"
            link = self.processes.get("superlink")
            if link is not None and link.poll() is not None:
                reason += (
                    f"\nthe SuperLink has ended ({link.returncode}): {self.log('superlink')[-500:]}"
                )
            raise FedkeepError(reason)
        return printed

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process and all below it; do nothing if it is gone already.

        Flower gives the apps that it starts sessions of their own, so that no group has them all.
        """
        process = self.processes.pop(name, None)
        if process is None:
            return
        for pid in family_of(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        """Return what the process of that name has printed."""
        return (self.deployment.root / f"{name}.log").read_text(errors="replace")


def serve(deployment: Deployment, app: Path, settings: Settings, *, resume: bool) -> None:
    """Start the SuperLink, submit the app and stream its log to its end.

    A run that ends early is resumed, and a SuperLink that ends is started again on its database.
    After `kill -9` of everything the same call with `resume` finds the same nodes and the last
    whole round.

    Parameters
    ----------
    deployment : Deployment
        Where the SuperLink listens, and whom it trusts.
    app : Path
        The folder of the app.
    settings : mapping
        What the run sets of the app's config.
    resume : bool
        Whether to continue what is saved.

    Raises
    ------
    FedkeepError
        If the run ended early several times in a row.
    """
    with LocalFleet(deployment) as fleet:
        fleet.start_superlink()
        if not deployment.insecure:
            fleet.register()
            log.info("the nodes are registered: start their SuperNodes")
        failures = 0
        noted = Serving(os.getpid(), fleet.processes["superlink"].pid)
        while True:
            deployment.note_serving(noted)
            began = time.monotonic()
            status = _play(fleet, app, {**settings, "state.resume": resume})
            if status == "finished:completed":
                return
            log.warning("the run ended as: %s", status)
            settled = time.monotonic() - began > _SETTLED_SECONDS
            failures, resume = (1 if settled else failures + 1), True
            if failures > _RESTARTS:
                raise FedkeepError(
                    f"the run ended early {failures} times in a row, the last time as: {status}; "
                    f"see {deployment.root}/superlink.log"
                )
            if fleet.is_alive("superlink"):
                noted = replace(noted, resumed=noted.resumed + 1, run_reason=status)
            else:
                noted = _with_new_superlink(fleet, noted)
                log.info("the SuperLink is started again; the run is resumed")


def _with_new_superlink(fleet: LocalFleet, noted: Serving) -> Serving:
    """Start the SuperLink again, and return what is to be said of it."""
    why = ending(fleet.processes["superlink"].returncode)
    fleet.kill("superlink")
    fleet.start_superlink()
    pid = fleet.processes["superlink"].pid
    return replace(noted, superlink=pid, restarts=noted.restarts + 1, reason=why)


def ending(code: int) -> str:
    """Say how a process ended, by its exit code.

    >>> ending(3), ending(-9)
    ('ended with code 3', 'was killed by signal 9')
    """
    return f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}"


def _play(fleet: LocalFleet, app: Path, settings: Settings) -> str:
    """Submit a run and stream its log; return how it ended, in Flower's words or ours."""
    try:
        run = fleet.submit(app, settings)
        while True:
            shown = ["flwr", "log", run, CONNECTION, "--stream"]
            subprocess.run(shown, env=fleet.environment, check=False)
            if (status := fleet.status(run)).startswith("finished"):
                return status
    except FedkeepError:
        if fleet.is_alive("superlink"):
            raise
        return f"the SuperLink {ending(fleet.processes['superlink'].returncode)}"


def family_of(pid: int) -> list[int]:
    """Return a process and all below it, whatever sessions they made for themselves."""
    below: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(status.parent.name))
    family = [pid]
    for member in family:
        family += below.get(member, [])
    return family


def wait_until(
    happened: Callable[[], bool], seconds: float, process: subprocess.Popen[bytes] | None = None
) -> bool:
    """Wait until something has happened.

    Returns
    -------
    bool
        False if it has not happened in time, or the process that would do it has ended.
    """
    end = time.monotonic() + seconds
    while (
        (alive := process is None or process.poll() is None)
        and not happened()
        and time.monotonic() < end
    ):
        time.sleep(0.1)
    return alive and happened()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on and that no system assigns by itself meanwhile.

    Raises
    ------
    FedkeepError
        If every port of the host is taken.
    """
    for port in random.SystemRandom().sample(_PORTS, k=len(_PORTS)):
        with (
            socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe,
            suppress(OSError),
        ):
            probe.bind((host, port))
            return port
    raise FedkeepError(f"every port of {host} from {_PORTS.start} to {_PORTS.stop - 1} is taken")


def program_environment() -> dict[str, str]:
    """Return the paths by which Flower's programs run in this interpreter's environment."""
    programs = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    modules = os.pathsep.join(path for path in sys.path if path)
    return {"PATH": programs, "PYTHONPATH": modules}
