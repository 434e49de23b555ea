"""What a fleet starts ends with it, wherever it went."""

from pathlib import Path

from fedkeep.deploy.deployment import Deployment
from fedkeep.deploy.local_fleet import LocalFleet
from tests.flower.real_fleet import wait_until


def test_a_kill_reaches_what_a_process_started_in_a_session_of_its_own(tmp_path: Path) -> None:
    with LocalFleet(Deployment(tmp_path, insecure=True)) as fleet:
        fleet.start("parent", ["sh", "-c", "setsid sleep 300 & echo $!; wait"])
        wait_until(lambda: fleet.log("parent").endswith("\n"), 120, "the child's number")
        child = Path("/proc", fleet.log("parent").strip())
        assert child.exists()
        fleet.kill("parent")
        wait_until(lambda: not child.exists(), 120, "the child's end")
