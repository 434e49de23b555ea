"""Memory of a device in a fleet: what Flower takes, and what fedkeep takes on top.

    python benchmarks/fleet_memory.py [--devices 2] [--seconds 40]

Starts a fleet as `fedkeep fleet` does and reads the resident memory of its processes while rounds
are played. Flower's floor is a SuperNode with its SuperExec, and for each message a process that
runs the ClientApp; fedkeep's are the agent, and what its app adds to that process.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from fedkeep.deploy.first_fleet import FirstFleet
from fedkeep.deploy.local_fleet import family_of, free_port, wait_until

FLOWERS = "import flwr.supernode.cli.flwr_clientapp"
OURS = f"{FLOWERS}\nimport fedkeep.flower.client_app"
LIMIT_MB = 60


def resident(pid: int) -> float:
    """Resident memory of a process in MB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def after(imports: str) -> float:
    """Resident memory of a Python process after these imports."""
    code = f"{imports}\nprint(open('/proc/self/status').read())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = [line for line in told.stdout.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def measured(fleet: FirstFleet, seconds: float) -> dict[str, list[float]]:
    """Memory by kind of process, of each device once a second."""
    found: dict[str, list[float]] = defaultdict(list)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        running = fleet.running()
        for number in fleet.devices():
            found["agent"].append(resident(running[f"agent-{number}"]))
            node = running[f"node-{number}"]
            found["SuperNode"].append(resident(node))
            for pid in set(family_of(node)) - {node}:
                words = Path(f"/proc/{pid}/cmdline")
                try:
                    command = words.read_text()
                except OSError:
                    continue
                kind = next((k for k in ("superexec", "clientapp") if k in command), None)
                if kind is not None and (size := resident(pid)):
                    found[kind].append(size)
        time.sleep(1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        fleet = FirstFleet(Path(folder) / "f")
        fleet.create(options.devices)
        fleet.start(free_port(), free_port())
        try:
            wait_until(lambda: fleet.reached() >= 1, 300)
            found = measured(fleet, options.seconds)
        finally:
            fleet.stop()
    floor = sum(statistics.median(found[kind]) for kind in ("SuperNode", "superexec"))
    agent, app, ours = max(found["agent"]), after(FLOWERS), after(OURS)
    print("| process of a device | resident MB |\n|---|---:|")
    for kind in ("SuperNode", "superexec"):
        print(f"| Flower's {kind} | {statistics.median(found[kind]):.0f} |")
    print(f"| Flower's process for a message, while it lasts, without an app | {app:.0f} |")
    print(f"| **Flower, between messages** | {floor:.0f} |")
    print(f"| the agent, at most | {agent:.0f} |")
    print(f"| what the app adds to the process for a message, while it lasts | {ours - app:.0f} |")
    print(f"| **fedkeep on top, between messages** | {agent:.0f} |")
    return int(agent > LIMIT_MB)


if __name__ == "__main__":
    sys.exit(main())
