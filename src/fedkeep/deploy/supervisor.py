"""The process that looks after a fleet on one machine.

`python -m fedkeep.deploy.supervisor FOLDER PORT PAGE` starts server, agents, SuperNodes and page;
what ends is started again, as systemd would, and all of them end with it. It survives a full disk.
"""

import errno
import logging
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedkeep.core.errors import FedkeepError
from fedkeep.deploy.deployment import Deployment, Serving
from fedkeep.deploy.first_fleet import FirstFleet
from fedkeep.deploy.local_fleet import LocalFleet, ending, free_port
from fedkeep.deploy.services import ServiceStatus, write_services

log = logging.getLogger("fedkeep.fleet")

_LOOK_SECONDS = 1.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
"""Seconds before a process is started again: twice as many each time, until it runs for a while."""
_SETTLED_SECONDS = 120.0
_REASON_LENGTH, _REASON_BYTES, _REASON_LINES = 300, 20_000, 12
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^fedkeep: |error|denied|cannot|failed", re.IGNORECASE)


@dataclass
class _Process:
    """A process that is to run."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    begun: float | None = None
    quick_ends: int = 0
    restarts: int = 0
    reason: str = ""
    ended: bool = True

    def is_due(self, now: float) -> bool:
        """Whether it is time to start it, or to start it again."""
        if not self.ended or self.begun is None:
            return self.ended
        pause = min(_SHORTEST_PAUSE * 2.0 ** max(0, self.quick_ends - 1), _LONGEST_PAUSE)
        return now - self.begun > pause


class Supervisor:
    """Keeps the processes of a fleet alive.

    Parameters
    ----------
    root : Path
        The fleet's folder.
    port, page : int
        Where the SuperLink and the page listen.
    """

    def __init__(self, root: Path, port: int, page: int) -> None:
        self._root, python = root, [sys.executable, "-m"]
        self._fleet = LocalFleet(Deployment(root, port=port))
        known, self._failing = FirstFleet(root), False
        self._noted: Serving | None = None
        known.record.parent.mkdir(exist_ok=True)
        server = ["fedkeep", "serve", str(known.specification), "--credentials", str(root)]
        server += ["--port", str(port), "--run", "fleet", "--resume"]
        watch = ["fedkeep", "watch", str(known.record.parent), "--port", str(page)]
        self._processes = {"page": _Process(python + watch), "server": _Process(python + server)}
        if known.twin.exists():
            self._processes["twin"] = _Process([*python, "fedkeep.cli.fifo_twin", str(root)])
        for number in known.devices():
            home = known.home(number)
            numbered = {
                "FEDKEEP_DEVICE": str(number),
                "FEDKEEP_DEVICES": str(len(known.devices())),
            }
            settings: dict[str, str | int] = {
                "device": number,
                "agent-socket": str(home / "agent.sock"),
            }
            agent = [*python, "fedkeep.agent", str(home / "agent.toml")]
            node = self._fleet.deployment.supernode(f"node-{number}", free_port(), settings)
            self._processes[f"agent-{number}"] = _Process(agent, numbered)
            self._processes[f"node-{number}"] = _Process(node)

    def run(self) -> None:
        """Look after the processes until this one is asked to end."""
        log.info("the fleet in %s starts: %s", self._root, ", ".join(self._processes))
        with self._fleet:
            while True:
                try:
                    self.look()
                    self._failing = False
                except OSError as error:  # a full disk: the processes that run go on
                    if not self._failing:
                        log.warning("cannot write in %s: %s", self._root, error.strerror)
                    self._failing = True
                time.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Note what has ended, start what is due, and write down how things are.

        Raises
        ------
        OSError
            If nothing can be written; what runs is left alone.
        """
        now = time.monotonic()
        for name, process in self._processes.items():
            if not process.ended and not self._fleet.is_alive(name):
                self._note_end(name, process, now)
            if process.is_due(now) and (self._is_serving() or not name.startswith("node-")):
                again = process.begun is not None
                self._fleet.start(name, process.command, process.environment)
                process.begun, process.ended = now, False
                process.restarts += again
                log.info("%s is started%s", name, " again" if again else "")
        services = {"fleet": ServiceStatus(os.getpid())}
        for name, process in self._processes.items():
            pid = None if process.ended else self._fleet.processes[name].pid
            services[name] = ServiceStatus(pid, process.restarts, process.reason)
        services |= self._of_server()
        write_services(self._root, services)

    def _is_serving(self) -> bool:
        """Whether the server knows the nodes' keys: a SuperNode that comes earlier ends at once."""
        return self._serving() is not None

    def _serving(self) -> Serving | None:
        """Return what the server that runs has noted; None before it did."""
        server, noted = self._fleet.processes.get("server"), self._fleet.deployment.serving()
        return noted if server is not None and noted and noted.server == server.pid else None

    def _of_server(self) -> dict[str, ServiceStatus]:
        """Return SuperLink and run as the server that runs noted them."""
        noted = self._serving()
        if noted is None:
            return {}
        if noted != self._noted:
            self._noted = noted
            if noted.restarts:
                log.warning("the superlink %s, and is started again", noted.reason)
            if noted.resumed:
                log.warning("the run ended as: %s, and is resumed", noted.run_reason)
        found = {"superlink": ServiceStatus(noted.superlink, noted.restarts, noted.reason)}
        if noted.resumed:  # a run is no process of ours: it lives with its SuperLink
            ended = f"ended as: {noted.run_reason}"
            found["run"] = ServiceStatus(noted.superlink, noted.resumed, ended)
        return found

    def _note_end(self, name: str, process: _Process, now: float) -> None:
        code = self._fleet.processes[name].returncode
        lived = now - (process.begun or now)
        process.quick_ends = 1 if lived > _SETTLED_SECONDS else process.quick_ends + 1
        by = ending(code)
        last = last_words(self._root / f"{name}.log") if code > 0 else ""
        process.reason, process.ended = f"{by}{': ' * bool(last)}{last}", True
        log.warning("%s %s", name, process.reason)


def last_words(path: Path) -> str:
    """Return the last line of a log that tells of an error, else the last one, shortened."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _REASON_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return os.strerror(error.errno or errno.EIO)
    plain = _COLOUR.sub("", text)
    lines = [line.strip() for line in plain.splitlines() if any(c.isalnum() for c in line)]
    lines = lines[-_REASON_LINES:]
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or lines or [""])[-1].removeprefix("fedkeep: ")[:_REASON_LENGTH]


def main(arguments: list[str]) -> int:
    """Look after the fleet in a folder until SIGTERM or Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.raiseExceptions = False  # a log that cannot be written ends nothing
    with suppress(KeyboardInterrupt):
        try:
            Supervisor(Path(arguments[0]), int(arguments[1]), int(arguments[2])).run()
        except FedkeepError as error:
            log.error("%s", error)
            return 2
    log.info("the fleet is stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
