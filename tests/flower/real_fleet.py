"""What tests and benchmarks over real SuperLinks share: the example app, its settings, waiting."""

import os
import signal
import sqlite3
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from flwr.app.user_config import UserConfig
from flwr.common.config import flatten_dict

from fedkeep.core.types import Vector
from fedkeep.deploy.credentials import provision
from fedkeep.deploy.deployment import Deployment
from fedkeep.deploy.local_fleet import LocalFleet, free_port
from fedkeep.sim.assembly import simulation_context

APP = Path(__file__).parents[2] / "examples" / "flower_app"
if str(APP) not in sys.path:
    sys.path.append(str(APP))
_REVIVE_SECONDS = 5.0


class Simulation(Deployment):
    """A SuperLink that runs Flower's simulation, with virtual nodes instead of SuperNodes."""

    def superlink(self) -> list[str]:
        return [*super().superlink(), "--simulation"]

    def run_virtual(self, app: Path, config: UserConfig, nodes: int) -> list[str]:
        resources = f"num-supernodes={nodes} client-resources-num-cpus=1"
        return [*self.run(app, config), "--federation-config", resources]


class RealFleet(LocalFleet):
    """A fleet whose SuperNodes run on this machine as well."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self._ports: dict[str, int] = {}
        self._started: dict[str, float] = {}
        self._nodes: dict[str, tuple[Mapping[str, str | int], tuple[str, ...]]] = {}

    @classmethod
    def private(
        cls, root: Path, nodes: int, *, host: str = "127.0.0.1", insecure: bool = False
    ) -> "RealFleet":
        """A fleet of its own on free ports, with fresh keys for nodes `node-0`, `node-1`, ..."""
        names = [f"node-{number}" for number in range(nodes)]
        provision(root, [host, "localhost"], names)
        return cls(Deployment(root, host, free_port(host), insecure=insecure))

    def __enter__(self) -> "RealFleet":
        return self

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
        self._started[name] = time.monotonic()
        self.start(name, [*wrapper, *self.deployment.supernode(name, port, settings)])

    def _is_due(self, name: str) -> bool:
        """Whether a node has ended, and was not started just now."""
        waited = time.monotonic() - self._started.get(name, 0.0)
        return not self.is_alive(name) and waited > _REVIVE_SECONDS

    def revive_nodes(self) -> None:
        """Starts nodes whose process has ended again, as systemd would; each after some seconds.

        A SuperLink refuses a node that it holds for online, and so one that was killed, until its
        heartbeat runs out; the SuperNode then ends.
        """
        for name in self._nodes:
            if name in self.processes and self._is_due(name):
                self.start_node(int(name.removeprefix("node-")))

    def run(self, app: Path, config: Mapping[str, str | int | float | bool], timeout: float) -> str:
        """Submits the app, waits for its end and returns its log."""
        return self.call([*self.deployment.run(app, config), "--stream"], timeout)


def app_config(**settings: str | int | float | bool) -> UserConfig:
    """The example app's run config with settings such as `train__rounds=5` put in."""
    table = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    changed: UserConfig = {key.replace("__", "."): value for key, value in settings.items()}
    return {**flatten_dict(table), **changed}


def app_accuracy(model: Vector, config: UserConfig) -> float:
    """The share of all simulated devices' test samples that a model of the example gets right."""
    from fedkeep_app.task import experiment_of

    context = simulation_context(experiment_of(config))
    test = context.data.pooled_test
    return float(np.mean(np.argmax(context.learner.logits(model, test.x), axis=1) == test.y))


def wait_until(happened: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen in {seconds:.0f} s")
        time.sleep(0.2)


def saved_round(database: Path, run: str = "default") -> int:
    """The round that a server has saved; -1 before the first."""
    with suppress(sqlite3.OperationalError):
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10)
        try:
            found = connection.execute(
                "SELECT round FROM fedkeep_runs WHERE run = ?", (run,)
            ).fetchone()
        finally:
            connection.close()
        return -1 if found is None else int(found[0])
    return -1


def kill_server_app(fleet: LocalFleet) -> None:
    """kill -9 of the ServerApp's process alone; its SuperLink lives on."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if b"flwr-serverapp" in command and fleet.deployment.address.encode() in command:
                os.kill(int(entry.name), signal.SIGKILL)


def start_nodes(fleet: RealFleet, nodes: int, **settings: str) -> None:
    for number in range(nodes):
        fleet.start_node(number, {"device": number, **settings})


def start_agent(
    fleet: LocalFleet,
    number: int,
    devices: int,
    policy: str = "ode",
    rate: float = 20.0,
    extra: str = "",
) -> Path:
    """Starts, or starts again on the same store, the agent of a device; returns its socket.

    `extra` is put before the example's configuration.
    """
    home = fleet.deployment.root / f"agent-{number}"
    home.mkdir(exist_ok=True)
    socket = home / "a.sock"
    config = (APP / "agent.toml").read_text()
    config = config.replace('"fedkeep.sock"', f'"{socket}"').replace(
        '"fedkeep.store"', f'"{home}/samples.store"'
    )
    config = config.replace("[store]", "[store]\ncommit_ms = 1")
    (home / "agent.toml").write_text(extra + config.replace('name = "ode"', f'name = "{policy}"'))
    environment = {
        "FEDKEEP_DEVICE": str(number),
        "FEDKEEP_DEVICES": str(devices),
        "FEDKEEP_RATE": str(rate),
    }
    command = [sys.executable, "-m", "fedkeep.agent", str(home / "agent.toml")]
    fleet.start(
        f"agent-{number}",
        command,
        {**environment, "PYTHONPATH": os.pathsep.join([str(APP), *sys.path])},
    )
    return socket


def agent_answers(socket: Path) -> bool:
    from fedkeep.protocol.client import AgentClient, AgentUnreachableError

    try:
        with AgentClient(str(socket), timeout=60) as agent:
            return agent.status().samples > 0
    except AgentUnreachableError:
        return False
