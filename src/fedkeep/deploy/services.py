"""What is known of a fleet's processes: a file that the supervisor writes and everyone may read."""

import json
from dataclasses import dataclass
from pathlib import Path

from fedkeep.files import atomic_write

_NAME = "processes.json"


@dataclass(frozen=True)
class ServiceStatus:
    """A process of a fleet, as the supervisor last noted it."""

    pid: int | None
    """None while it does not run."""
    restarts: int = 0
    """How many times it was started again since the fleet was."""
    reason: str = ""
    """Why it last ended, where it did."""


def write_services(root: Path, services: dict[str, ServiceStatus]) -> None:
    """Write the file, whole or not at all."""
    noted = {
        name: {
            "pid": s.pid,
            "born": None if s.pid is None else _born(s.pid),
            "restarts": s.restarts,
            "reason": s.reason,
        }
        for name, s in services.items()
    }
    with atomic_write(root / _NAME) as file:
        file.write(json.dumps(noted).encode())


def read_services(root: Path) -> dict[str, ServiceStatus]:
    """Return what was last written; a process that has ended since has no number.

    Neither has one whose number another process has now.
    """
    try:
        noted = json.loads((root / _NAME).read_text())
        return {
            name: ServiceStatus(
                one["pid"] if one["pid"] is not None and _born(one["pid"]) == one["born"] else None,
                one["restarts"],
                one["reason"],
            )
            for name, one in noted.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _born(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if there is none that lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
