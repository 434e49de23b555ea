"""What is known of a fleet's processes: a file that the supervisor writes and everyone may read."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from fedkeep.files import atomic_write

_NAME = "processes.json"
_LOW_DISK_BYTES = 32 << 20
"""Free space under which a fleet is said to have none."""


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


def troubles(root: Path) -> tuple[str, ...]:
    """Say what is not as it should be with a fleet's processes, and with its disk.

    Parameters
    ----------
    root : Path
        The fleet's folder.

    Returns
    -------
    tuple of str
        A sentence each: processes that do not run, or were started again, and a full disk.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> troubles(Path(mkdtemp()))
    ()
    """
    services = read_services(root)
    if not services:
        return ()
    running = any(service.pid is not None for service in services.values())
    found = [
        f"{name} {words}"
        for name, service in services.items()
        if (words := _trouble_of(service, expected=running))
    ]
    if (free := low_disk(root)) is not None:
        found.insert(0, f"The disk is full: {free >> 20} MB are free in {root}; free some")
    return tuple(found)


def low_disk(root: Path) -> int | None:
    """Return the free bytes of a folder's disk where they are too few, else None."""
    free = shutil.disk_usage(root).free
    return free if free < _LOW_DISK_BYTES else None


def _trouble_of(service: ServiceStatus, *, expected: bool) -> str:
    words = []
    if service.pid is None and expected:
        words.append("does not run")
    if service.restarts:
        times = "once" if service.restarts == 1 else f"{service.restarts} times"
        words.append(f"was started again {times}")
    why = f": it {service.reason}" if words and service.reason else ""
    return " and ".join(words) + why


def _born(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if there is none that lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
