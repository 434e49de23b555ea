"""A whole deployment on this machine: real SuperLink and SuperNodes, TLS and node keys, private ports."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from fedkeep.core.errors import FedkeepError, MissingExtraError
from fedkeep.deploy.credentials import provision
from fedkeep.deploy.deployment import Deployment

_START_SECONDS = 60.0
_REVIVE_SECONDS = 5.0
_REGISTERING = 4
"""Registrations at a time: each is a program of Flower's that takes seconds to start."""
_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


class LocalFleet:
    """Starts and stops the processes of a fleet; each leads its own group, so that none is left behind."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._ports: dict[str, int] = {}
        self._begun: dict[str, float] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._nodes: dict[str, tuple[Mapping[str, str | int], tuple[str, ...]]] = {}
        deployment.root.mkdir(parents=True, exist_ok=True)
        deployment.write_connection()

    @classmethod
    def private(cls, root: Path, nodes: int, *, host: str = "127.0.0.1", insecure: bool = False) -> LocalFleet:
        """A fleet of its own on free ports, with fresh keys for nodes `node-0`, `node-1`, ..."""
        names = [f"node-{number}" for number in range(nodes)]
        provision(root, [host, "localhost"], names)
        return cls(Deployment(root, host, free_port(host), insecure=insecure))

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(list(self._processes)):
            self.kill(name)

    def start_superlink(self) -> None:
        """Starts the SuperLink and waits until it answers; refuses to go on when its port is taken."""
        deployment = self.deployment
        where = (deployment.bind or deployment.host, deployment.port)
        if _answers(*where):
            raise FedkeepError(f"{deployment.address} is taken by another program: choose another port")
        process = self.start("superlink", deployment.superlink())
        end = time.monotonic() + _START_SECONDS
        while not _answers(*where):
            if process.poll() is not None or time.monotonic() > end:
                why = self.log("superlink")[-500:]
                raise FedkeepError(f"the SuperLink did not start on {deployment.address}: {why}")
            time.sleep(0.1)

    def register(self) -> None:
        """Registers every node's key with the running SuperLink; one that is registered stays so."""
        commands = [self.deployment.register(name) for name in self.deployment.credentials.nodes()]
        with ThreadPoolExecutor(_REGISTERING) as pool:
            list(pool.map(partial(self.call, may_fail=True), commands))

    def start_node(
        self, number: int, config: Mapping[str, str | int] | None = None, within: Sequence[str] = ()
    ) -> None:
        """Starts one SuperNode, or starts it again with the same key and settings.

        `within` is a command that runs another one, such as `ip netns exec NAME`.
        """
        name = f"node-{number}"
        before = self._nodes.get(name, ({"device": number}, ()))
        settings, wrapper = (before[0] if config is None else config), tuple(within) or before[1]
        self._nodes[name] = (settings, wrapper)
        port = self._ports.setdefault(name, free_port())
        self.start(name, [*wrapper, *resolved(self.deployment.supernode(name, port, settings))])

    def revive_nodes(self) -> None:
        """Starts nodes whose process has ended again, as systemd would; at most every few seconds each.

        A SuperLink refuses a node that it holds for online, and so one that was killed, until its heartbeat runs
        out; the SuperNode then ends.
        """
        for name in self._nodes:
            if name in self._processes and self.is_due(name, _REVIVE_SECONDS):
                self.start_node(int(name.removeprefix("node-")))

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a process that ends with the fleet; its output goes to NAME.log."""
        with (self.deployment.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                resolved(command),
                env=self.environment() | dict(environment or {}),
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - a single system call
            )
        self._processes[name] = process
        self._begun[name] = time.monotonic()
        return process

    def run(self, app: Path, config: Mapping[str, str | int | float | bool], timeout: float) -> str:
        """Submits the app, waits for its end and returns its log."""
        return self.call([*self.deployment.run(app, config), "--stream"], timeout)

    def submit(self, app: Path, config: Mapping[str, str | int | float | bool]) -> str:
        """Submits the app and returns the run's number."""
        said = self.call([*self.deployment.run(app, config), "--format", "json"])
        return str(json.loads(said[said.index("{") : said.rindex("}") + 1])["run-id"])

    def status(self, run: str) -> str:
        """The status of a run, e.g. `running` or `finished:completed`."""
        said = self.call([*self.deployment.list_runs(run), "--format", "json"])
        return str(json.loads(said[said.index("{") : said.rindex("}") + 1])["runs"][0]["status"])

    def call(self, command: Sequence[str], timeout: float = 120.0, *, may_fail: bool = False) -> str:
        """Runs one of Flower's commands to its end and returns what it printed."""
        done = subprocess.run(
            resolved(command),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode and not may_fail:
            raise FedkeepError(f"`{' '.join(command[:3])}` failed: {(done.stdout + done.stderr)[-800:]}")
        return done.stdout + done.stderr

    def is_due(self, name: str, pause: float) -> bool:
        """Whether a process is to be started: it never was, or it has ended and began that long ago."""
        process = self._processes.get(name)
        return process is None or (process.poll() is not None and time.monotonic() - self._begun[name] > pause)

    def alive(self) -> dict[str, int]:
        """The processes that have not ended, by name."""
        return {name: process.pid for name, process in self._processes.items() if process.poll() is None}

    def process(self, name: str) -> subprocess.Popen[bytes]:
        return self._processes[name]

    def kill(self, name: str) -> None:
        """kill -9 of a process and all it started; nothing if it is gone already."""
        process = self._processes.pop(name, None)
        if process is not None:
            for pid in _family(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def log(self, name: str) -> str:
        return (self.deployment.root / f"{name}.log").read_text(errors="replace")

    def environment(self) -> dict[str, str]:
        """This process's environment with Flower's settings."""
        return os.environ | program_environment() | self.deployment.environment()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _family(pid: int) -> list[int]:
    """A process and all below it; Flower gives the apps that it starts sessions of their own, so no group has them."""
    below: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(status.parent.name))
    found = [pid]
    for member in found:
        found += below.get(member, [])
    return found


def _die_with_parent() -> None:
    """Asks Linux to end this process with the one that started it, however that ends: no SuperLink keeps a port."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def program_environment() -> dict[str, str]:
    """Paths by which Flower's programs, and what they start, come from this interpreter's environment."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    modules = os.pathsep.join(path for path in sys.path if path)
    return {"PATH": programs, "PYTHONPATH": modules}


def resolved(command: Sequence[str]) -> list[str]:
    """The command with the full path of its program."""
    found = shutil.which(command[0], path=program_environment()["PATH"])
    if found is None:
        raise MissingExtraError(command[0], "flower")
    return [found, *command[1:]]


def _answers(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
