"""A whole fleet in one folder on one machine: server, agents, their SuperNodes and the page, looked after and stopped.

`python -m fedkeep.deploy.first_fleet FOLDER PORT PAGE` is the process that looks after the others; what dies is started
again, as systemd would, and all of them end with it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.deploy.credentials import provision
from fedkeep.deploy.deployment import Deployment
from fedkeep.deploy.local_fleet import LocalFleet, free_port, program_environment, wait_until
from fedkeep.files import atomic_write

_RESTART_SECONDS, _STOP_SECONDS = 5.0, 30.0
_SAMPLES = """\
[samples]
shape = [30]
labels = 10

[model]
name = "softmax"
"""
_SPECIFICATION = """\
# What this fleet does; `fedkeep explain` and docs/flower.md tell the rest.
{samples}
[train]
rounds = 100000
participation = 1.0
learning_rate = 0.05
epochs = 3

[rounds]
min_devices = {devices}
deadline = 30.0
evaluate_every = 1
"""
_AGENT = """\
# A device of this fleet. Put your own source, samples and model here; fleet.toml must say the same of the last two.
[agent]
socket = "{home}/agent.sock"

{samples}
[store]
path = "{home}/samples.store"
budget = 250000

[[source]]
kind = "iterator"
function = "fedkeep.data.demo_stream:arrivals"
"""


@dataclass(frozen=True)
class FirstFleet:
    """A folder with fleet.toml, keys, and a folder for each device.

    >>> from tempfile import mkdtemp
    >>> fleet = FirstFleet(Path(mkdtemp()))
    >>> fleet.create(devices=2)
    >>> fleet.devices(), fleet.running()
    ([0, 1], {})
    """

    root: Path

    def create(self, devices: int) -> None:
        """Writes specification, keys and the devices' configurations; what exists is left as it is."""
        if len(str(self.home(devices) / "agent.sock")) > 100:  # Linux takes no more
            raise ConfigError(
                f"{self.root} is too long a path for an agent's socket: choose a shorter one"
            )
        provision(
            self.root, ["127.0.0.1", "localhost"], [f"node-{number}" for number in range(devices)]
        )
        files = {self.root / "fleet.toml": _SPECIFICATION.format(samples=_SAMPLES, devices=devices)}
        for home in map(self.home, range(devices)):
            files[home / "agent.toml"] = _AGENT.format(samples=_SAMPLES, home=home)
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(text, encoding="utf-8")

    def home(self, number: int) -> Path:
        return self.root / "devices" / str(number)

    def devices(self) -> list[int]:
        found = sorted(int(path.parent.name) for path in self.root.glob("devices/*/agent.toml"))
        if not found:
            raise ConfigError(
                f"there is no fleet in {self.root}: run `fedkeep fleet init {self.root}` first"
            )
        return found

    def start(self, port: int, page: int) -> int:
        """Starts the process that looks after the fleet, which outlives this one; returns its number."""
        self.devices()
        if "fleet" in self.running():
            raise FedkeepError(
                f"the fleet in {self.root} is running: stop it by `fedkeep fleet stop {self.root}`"
            )
        command = [
            sys.executable,
            "-m",
            "fedkeep.deploy.first_fleet",
            str(self.root),
            str(port),
            str(page),
        ]
        with (self.root / "fleet.log").open("ab") as log:
            environment = os.environ | program_environment()
            started = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        if not wait_until(lambda: "page" in self.running(), _STOP_SECONDS, started):
            raise FedkeepError(f"the fleet did not start: see {self.root / 'fleet.log'}")
        return started.pid

    def stop(self) -> bool:
        """Ends what `start` started, by the number it had, and nothing else; False if it was not running."""
        self.devices()
        pid = self.running().get("fleet")
        if pid is None:
            return False
        os.kill(pid, signal.SIGTERM)
        if not wait_until(lambda: "fleet" not in self.running(), _STOP_SECONDS):
            raise FedkeepError(f"process {pid} does not end: see {self.root / 'fleet.log'}")
        return True

    def running(self) -> dict[str, int]:
        """The processes of the fleet that are alive, by name; a number that another process has now is not ours."""
        try:
            noted: dict[str, list[int]] = json.loads((self.root / "processes.json").read_text())
        except (OSError, ValueError):
            return {}
        return {name: pid for name, (pid, born) in noted.items() if _born(pid) == born}

    def watch_over(self, port: int, page: int) -> None:
        """Keeps the processes of the fleet alive until this one is told to end."""
        devices, python, root = self.devices(), [sys.executable, "-m"], str(self.root)
        (self.root / "records").mkdir(exist_ok=True)
        server = [
            "fedkeep",
            "serve",
            f"{root}/fleet.toml",
            "--credentials",
            root,
            "--port",
            str(port),
        ]
        commands = {
            "page": [*python, "fedkeep", "watch", f"{root}/records", "--port", str(page)],
            "server": [*python, *server, "--run", "fleet", "--resume"],
        }
        numbered: dict[str, dict[str, str]] = {}
        with LocalFleet(Deployment(self.root, port=port)) as fleet:
            for number in devices:
                home, agent, node = self.home(number), f"agent-{number}", f"node-{number}"
                numbered[agent] = {
                    "FEDKEEP_DEVICE": str(number),
                    "FEDKEEP_DEVICES": str(len(devices)),
                }
                settings: dict[str, str | int] = {
                    "device": number,
                    "agent-socket": str(home / "agent.sock"),
                }
                commands[agent] = [*python, "fedkeep.agent", str(home / "agent.toml")]
                commands[node] = fleet.deployment.supernode(node, free_port(), settings)
            while True:
                for name, command in commands.items():
                    if fleet.is_due(name, _RESTART_SECONDS):
                        fleet.start(name, command, numbered.get(name))
                alive = {
                    name: process.pid
                    for name, process in fleet.processes.items()
                    if process.poll() is None
                }
                noted = {
                    name: [pid, _born(pid)] for name, pid in {"fleet": os.getpid(), **alive}.items()
                }
                with atomic_write(self.root / "processes.json") as file:
                    file.write(json.dumps(noted).encode())
                time.sleep(1.0)


def _born(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if there is none that lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        FirstFleet(Path(sys.argv[1])).watch_over(int(sys.argv[2]), int(sys.argv[3]))
