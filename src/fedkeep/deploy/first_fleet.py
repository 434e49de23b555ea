"""A whole fleet in one folder on one machine: its files, its start and its end.

The process that looks after the others is `fedkeep.deploy.supervisor`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.config.method import parse_fleet, table_of
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.data.synthetic import Demo
from fedkeep.deploy.credentials import provision
from fedkeep.deploy.local_fleet import program_environment, wait_until
from fedkeep.deploy.ports import listeners, require_free
from fedkeep.deploy.services import ServiceStatus, read_services
from fedkeep.records import Members
from fedkeep.records.lines import decode, stamp
from fedkeep.tables import read_toml

_STOP_SECONDS, _READY_SECONDS, _LOOK_SECONDS = 30.0, 300.0, 0.5
_TAIL_BYTES = 1 << 20
"""Of a record: more than its last list of devices, and a round besides."""
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
_TWIN = """\
# FIFO beside the fleet on its page: an experiment that the simulator plays as far as the fleet
# has come, with the fleet's devices and slots. Delete this file once the data are your own.
task = { name = "demo" }
policy = { name = "fifo" }
gist = { mode = "none" }
stream = { rounds_per_pass = 5 }
train = { rounds = 100000, participation = 1.0, learning_rate = 0.05, epochs = 3 }
"""
_AGENT = """\
# A device of this fleet. Put your own source, samples and model here;
# fleet.toml must say the same of the last two.
[agent]
socket = "{home}/agent.sock"
held_out = "{home}/held_out.npz" # samples that the model is tested on and never trained on

{samples}
[store]
path = "{home}/samples.store"
budget = 81920

[[source]]
kind = "iterator"
function = "fedkeep.data.demo_stream:arrivals"
"""


@dataclass(frozen=True)
class FirstFleet:
    """A folder with fleet.toml, keys, and a folder for each device.

    Parameters
    ----------
    root : Path
        The folder.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> fleet = FirstFleet(Path(mkdtemp()))
    >>> fleet.create(devices=2)
    >>> fleet.devices(), fleet.running()
    ([0, 1], {})
    """

    root: Path

    @property
    def specification(self) -> Path:
        """What the fleet does: its fleet.toml."""
        return self.root / "fleet.toml"

    @property
    def record(self) -> Path:
        """The record that the page shows."""
        return self.root / "records" / "fleet.jsonl"

    @property
    def twin(self) -> Path:
        """The experiment that is played beside the fleet, if there is one."""
        return self.root / "twin.toml"

    @property
    def state(self) -> Path:
        """The server's saved rounds."""
        return self.root / "state.db"

    def create(self, devices: int) -> None:
        """Write specification, keys and the devices' configurations; what exists stays as it is.

        Raises
        ------
        ConfigError
            If the folder's path is too long for an agent's socket.
        """
        if len(str(self.home(devices) / "agent.sock")) > 100:  # Linux takes no more
            raise ConfigError(
                f"{self.root} is too long a path for an agent's socket: choose a shorter one"
            )
        provision(
            self.root, ["127.0.0.1", "localhost"], [f"node-{number}" for number in range(devices)]
        )
        files = {self.specification: _SPECIFICATION.format(samples=_SAMPLES, devices=devices)}
        files[self.twin] = _TWIN
        for home in map(self.home, range(devices)):
            files[home / "agent.toml"] = _AGENT.format(samples=_SAMPLES, home=home)
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text(text, encoding="utf-8")
        data = Demo(devices=devices).load(seed=0)
        for number in range(devices):
            test = data.test_batch(number)
            np.savez(self.home(number) / "held_out.npz", x=test.x, y=test.y)

    def home(self, number: int) -> Path:
        """Return the folder of a device."""
        return self.root / "devices" / str(number)

    def devices(self) -> list[int]:
        """Return the numbers of the devices that have a configuration.

        Raises
        ------
        ConfigError
            If there is none: the folder holds no fleet.
        """
        found = sorted(int(path.parent.name) for path in self.root.glob("devices/*/agent.toml"))
        if not found:
            raise ConfigError(
                f"there is no fleet in {self.root}: run `fedkeep fleet init {self.root}` first"
            )
        return found

    def start(
        self, port: int, page: int, progress: Callable[[str], None] = lambda _: None
    ) -> dict[str, ServiceStatus]:
        """Start the fleet, which outlives this process, and wait until its first round can open.

        Parameters
        ----------
        port, page : int
            Where the SuperLink and the page listen.
        progress : callable
            Called with a line whenever something has changed.

        Returns
        -------
        dict of str to ServiceStatus
            Its processes; a device that could not start has its reason there.

        Raises
        ------
        ConfigError
            If the fleet runs already, or a port is taken.
        FedkeepError
            If it cannot open a round. Then nothing of it runs any more.
        """
        self.devices()
        if "fleet" in self.running():
            raise ConfigError(
                f"the fleet in {self.root} is running: stop it by `fedkeep fleet stop {self.root}`"
            )
        if port == page:
            raise ConfigError("--port and --page must differ: each is another program's")
        require_free(port, "the server", "--port")
        require_free(page, "the page", "--page")
        rounds = parse_fleet(read_toml(self.specification)).deployment["rounds"]
        least = int(rounds.get("min_devices", 1))
        if least > len(self.devices()):
            raise ConfigError(
                f"rounds.min_devices is {least}, and this fleet has {len(self.devices())} devices: "
                f"lower it in {self.specification}, or add devices by `fedkeep fleet init`"
            )
        module = "fedkeep.deploy.supervisor"
        command = [sys.executable, "-m", module, str(self.root), str(port), str(page)]
        began = time.time()
        with (self.root / "fleet.log").open("ab") as log:
            environment = os.environ | program_environment()
            started = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            return self._wait_ready(started, page, least, began, progress)
        except BaseException:
            if started.poll() is None:
                os.kill(started.pid, signal.SIGTERM)
                wait_until(lambda: started.poll() is not None, _STOP_SECONDS)
            raise

    def stop(self) -> bool:
        """End what `start` started, by its process number, and nothing else.

        Returns
        -------
        bool
            False if it was not running.
        """
        self.devices()
        pid = self.running().get("fleet")
        if pid is None:
            return False
        os.kill(pid, signal.SIGTERM)
        if not wait_until(lambda: "fleet" not in self.running(), _STOP_SECONDS):
            raise FedkeepError(f"process {pid} does not end: see {self.root / 'fleet.log'}")
        return True

    def reset(self) -> Path:
        """Set aside what the fleet has learnt and stored; keys and configurations stay.

        Returns
        -------
        Path
            The folder in which everything is now.

        Raises
        ------
        ConfigError
            If the fleet is running.
        """
        devices = self.devices()
        if "fleet" in self.running():
            raise ConfigError(f"stop the fleet first: `fedkeep fleet stop {self.root}`")
        number = 1
        while (aside := self.root / f"before-{number}").exists():
            number += 1
        aside.mkdir()
        found = [self.state, self.root / "records"]
        for device in devices:
            home = self.home(device)
            store = table_of(read_toml(home / "agent.toml"), "store").get("path")
            stored = home / "samples.store" if store is None else Path(str(store))
            found += sorted(stored.parent.glob(f"{stored.name}*"))
        for path in found:
            if path.exists():
                inside = path.is_relative_to(self.root)
                to = aside / (path.relative_to(self.root) if inside else Path(path.name))
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, to)
        return aside

    def capacity(self) -> int | None:
        """Return how many samples a device stores, at the median; None until they have said so."""
        members = self.members()
        known = sorted(m.capacity for m in members.members if m.capacity) if members else []
        return known[len(known) // 2] if known else None

    def reached(self) -> int:
        """Return the round that the record has last seen of the devices."""
        members = self.members()
        return 0 if members is None else members.round

    def services(self) -> dict[str, ServiceStatus]:
        """Return the processes of the fleet by name, as the supervisor last noted them."""
        return read_services(self.root)

    def running(self) -> dict[str, int]:
        """Return the process numbers of those that are alive.

        A number that another process has now is not ours.
        """
        return {name: s.pid for name, s in self.services().items() if s.pid is not None}

    def members(self, since: float = 0.0) -> Members | None:
        """Return who the server last saw; None if that is older than `since`, or not recorded."""
        found: Members | None = None
        try:
            with self.record.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                raw_lines = file.read().splitlines()
        except OSError:
            return None
        for raw in raw_lines:
            known = stamp(raw)
            if known is not None and known.kind == "members":
                line = decode(raw)
                found = line if isinstance(line, Members) else found
        seen = [m.seen for m in found.members if m.seen is not None] if found is not None else []
        return found if max(seen, default=0.0) >= since else None

    def _wait_ready(
        self,
        started: subprocess.Popen[bytes],
        page: int,
        least: int,
        began: float,
        progress: Callable[[str], None],
    ) -> dict[str, ServiceStatus]:
        """Wait until enough devices are online at the server, and the page is ours."""
        end, shown = time.monotonic() + _READY_SECONDS, ""
        while True:
            services = self.services() if started.poll() is None else {}
            online = self._online(began)
            broken = {name: s for name, s in services.items() if s.restarts or s.pid is None}
            lost = {name.partition("-")[2] for name in broken if "-" in name}
            for name in ("server", "page"):
                if name in broken and broken[name].reason:
                    raise FedkeepError(f"the {name} did not start: {broken[name].reason}")
            if started.poll() is not None:
                last = (self.root / "fleet.log").read_text(errors="replace").splitlines()[-1:]
                raise FedkeepError(f"the fleet did not start: {' '.join(last)}")
            why = "; ".join(f"{name}: {s.reason}" for name, s in broken.items() if s.reason)
            if len(self.devices()) - len(lost) < least and why:
                raise FedkeepError(f"too few devices can start: {why}")
            if online >= least and listeners(page) & {services["page"].pid}:
                return services
            words = f"{online} of {least} devices are online"
            if words != shown:
                progress(words)
                shown = words
            if time.monotonic() >= end:
                raise FedkeepError(
                    f"no round could open within {_READY_SECONDS:.0f} s: {words}; {why or 'see'} "
                    f"{self.root}/server.log"
                )
            time.sleep(_LOOK_SECONDS)

    def _online(self, began: float) -> int:
        members = self.members(since=began)
        return 0 if members is None else sum(member.online for member in members.members)
