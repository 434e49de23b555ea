"""The command lines of a deployment, for the operator, for `fedkeep serve` and for the tests."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fedkeep.core.errors import ConfigError
from fedkeep.deploy.credentials import Credentials
from fedkeep.files import atomic_write
from fedkeep.protocol.addresses import Address, is_loopback

CONNECTION = "fedkeep"
"""The name of the SuperLink in Flower's own config.toml."""


@dataclass(frozen=True)
class Serving:
    """What a server that looks after itself says of its SuperLink and its run."""

    server: int
    """Its process."""
    superlink: int
    """The process of its SuperLink."""
    restarts: int = 0
    """How often it has started that again."""
    reason: str = ""
    """Why the SuperLink last ended."""
    resumed: int = 0
    """How often the run has ended early, and was resumed, on a SuperLink that went on."""
    run_reason: str = ""
    """How the run last ended."""


@dataclass(frozen=True)
class Deployment:
    """A SuperLink at an address, the credentials it trusts, and Flower's home beside them.

    Examples
    --------
    >>> deployment = Deployment(Path("fleet"), "fleet.example")
    >>> " ".join(deployment.supernode("node-0", 9094, {"device": 0})[:4])
    'flower-supernode --superlink fleet.example:8000 --host'
    >>> Deployment(Path("fleet"), "fleet.example", insecure=True)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedkeep.core.errors.ConfigError: --insecure is for loopback only, and fleet.example is not: ...
    """

    root: Path
    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False
    bind: str | None = None
    """The address to listen on when it is not `host`, e.g. 0.0.0.0 behind a name."""

    def __post_init__(self) -> None:
        listens_on = self.bind or self.host
        if self.insecure and not (is_loopback(self.host) and is_loopback(listens_on)):
            raise ConfigError(
                f"--insecure is for loopback only, and {listens_on} is not: run `fedkeep provision`"
            )

    @property
    def credentials(self) -> Credentials:
        """Return the credentials in the deployment's folder."""
        return Credentials(self.root)

    @property
    def address(self) -> str:
        """Return the SuperLink's address, as HOST:PORT."""
        return str(Address(self.host, self.port))

    def environment(self) -> dict[str, str]:
        """Return the variables that Flower's programs need.

        They name its home, turn telemetry and update checks off, and let a client start soon.
        """
        return {
            "FLWR_HOME": str(self.root / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def write_connection(self) -> None:
        """Write Flower's own config.toml, which says how its commands reach the SuperLink."""
        file = self.root / "flower" / "config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        trust = "insecure = true"
        if not self.insecure:
            trust = (
                f"root-certificates = {json.dumps(str(self.credentials.ca_certificate.resolve()))}"
            )
        text = (
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f"[superlink.{CONNECTION}]\naddress = {json.dumps(self.address)}\n{trust}\n"
        )
        with atomic_write(file) as opened:  # a full disk leaves what was there
            opened.write(text.encode())

    def note_serving(self, serving: "Serving") -> None:
        """Write down that a process serves; the nodes' keys are registered then."""
        with atomic_write(self.root / "serving.json") as file:
            file.write(json.dumps(asdict(serving)).encode())

    def serving(self) -> "Serving | None":
        """Return what was noted last; None if that was nothing, or cannot be read."""
        try:
            return Serving(**json.loads((self.root / "serving.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def superlink(self) -> list[str]:
        """Return the command of the SuperLink.

        It has TLS and node authentication unless insecure, keeps its state on disk, and installs
        no dependencies of apps.
        """
        command = ["flower-superlink", "--host", self.bind or self.host, "--port", str(self.port)]
        command += [
            "--database",
            str(self.root / "superlink.db"),
            "--disable-runtime-dependency-installation",
        ]
        if self.insecure:
            return [*command, "--insecure"]
        command += [
            "--ssl-ca-certfile",
            str(self.root / "ca.crt"),
            "--ssl-certfile",
            str(self.root / "server.crt"),
        ]
        return [*command, "--ssl-keyfile", str(self.root / "server.key"), "--enable-supernode-auth"]

    def supernode(self, node: str, runtime_port: int, config: Mapping[str, str | int]) -> list[str]:
        """Return the command of one device's SuperNode.

        Its key is its identity, so it is the same device after any restart.
        """
        command = ["flower-supernode", "--superlink", self.address, "--host", "127.0.0.1"]
        command += ["--port", str(runtime_port), "--node-config", _settings(config)]
        if self.insecure:
            return [*command, "--insecure"]
        command += ["--root-certificates", str(self.credentials.ca_certificate)]
        return [*command, "--auth-supernode-private-key", str(self.credentials.node_key(node))]

    def register(self, node: str) -> list[str]:
        """Return the command that lets the SuperLink trust the node's key."""
        public_key = str(self.credentials.node_key(f"{node}.pub"))
        return ["flwr", "supernode", "register", public_key, CONNECTION, "--name", node]

    def run(self, app: Path, config: Mapping[str, str | int | float | bool]) -> list[str]:
        """Return the command that submits the app with this run configuration."""
        return [
            "flwr",
            "run",
            str(app),
            CONNECTION,
            *(["--run-config", _settings(config)] if config else []),
        ]

    def instructions(self, nodes: list[str]) -> str:
        """Return the lines an operator types, in order."""
        there = {key: value for key, value in self.environment().items() if key != "FLWR_HOME"}
        state = {"state.url": str(self.root / "state.db")}
        lines = ["# on the server", _exports(self.environment()), shlex.join(self.superlink())]
        if not self.insecure:
            lines += ["", "# once, on the server, while the SuperLink runs"]
            lines += [shlex.join(self.register(node)) for node in nodes]
        lines += [
            "",
            "# on each device, with ca.crt and its own key copied there, "
            "beside an agent with that socket;",
        ]
        lines += ["# without agent-socket the device is simulated", _exports(there)]
        for number, node in enumerate(nodes):
            command = self.supernode(
                node, 9094 + number, {"device": number, "agent-socket": f"/run/fedkeep/{node}.sock"}
            )
            if not is_loopback(self.host):  # a device has the files where they were copied to
                copied = {
                    str(self.credentials.ca_certificate): "ca.crt",
                    str(self.credentials.node_key(node)): node,
                }
                command = [copied.get(word, word) for word in command]
            lines.append(shlex.join(command))
        lines += [
            "",
            "# then, on the server, in the app's folder",
            shlex.join(self.run(Path(), state)),
        ]
        return "\n".join(lines)


def _exports(environment: Mapping[str, str]) -> str:
    return f"export {' '.join(f'{key}={shlex.quote(value)}' for key, value in environment.items())}"


def _settings(config: Mapping[str, str | int | float | bool]) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
