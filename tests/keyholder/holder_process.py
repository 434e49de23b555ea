"""A real key-holder in a separate process, to be asked, killed and started again."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fedkeep.keyholder.service import KeyHolderClient, secured
from fedkeep.protocol.addresses import Address

SOURCE = Path(__file__).parents[2] / "src"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def fedkeep(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fedkeep", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@dataclass(eq=False)
class HolderProcess:
    """`fedkeep keyholder serve` over TLS on a free loopback port."""

    keys: Path
    credentials: Path
    least_devices: int = 3
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        where = ("--listen", f"127.0.0.1:{self.port}", "--credentials", str(self.credentials))
        command = fedkeep(
            "keyholder", "serve", str(self.keys), *where, "--least-devices", str(self.least_devices)
        )
        log = (self.keys.parent / f"{self.keys.name}.log").open("a")
        with log:
            self._process = subprocess.Popen(
                command,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("listening on"), line

    def kill(self) -> None:
        """As by `kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    @property
    def client(self) -> KeyHolderClient:
        return KeyHolderClient(
            Address("127.0.0.1", self.port), secured(self.credentials, "planner")
        )
