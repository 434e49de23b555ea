"""A fleet on a disk that is really full: it lives, says so, and goes on once there is space."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedkeep.core.errors import DataError
from fedkeep.deploy.first_fleet import FirstFleet
from fedkeep.deploy.local_fleet import free_port
from fedkeep.deploy.services import troubles
from fedkeep.records import read_run
from tests.flower.real_fleet import wait_until
from tests.flower.test_real_first_fleet import fedkeep

pytestmark = pytest.mark.real

_DISK = "96m"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own; mounting one takes root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "fedkeep-test", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here: that takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until the disk takes nothing more."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return


def test_a_full_disk_is_survived_and_seen(disk: Path) -> None:
    root = disk / "f"
    fleet, record = FirstFleet(root), root / "records" / "fleet.jsonl"

    def round_() -> int:
        try:
            return max((line.round for line in read_run(record).rounds), default=0)
        except DataError:
            return 0

    fedkeep("init", root, "--devices", 2)
    fedkeep("start", root, "--port", free_port(), "--page", free_port())
    try:
        wait_until(lambda: round_() >= 1, 300, "the first round")
        supervisor = fleet.running()["fleet"]
        fill(disk / "rubbish")
        assert "disk      FULL: 0 MB are free" in fedkeep("status", root)
        assert troubles(root)[0].startswith("The disk is full"), "what the page shows"
        fill(disk / "more")  # logs were cut off meanwhile: not a byte is left
        before = round_()
        (disk / "rubbish").unlink()
        (disk / "more").unlink()
        wait_until(lambda: round_() >= before + 2, 400, "two more rounds")
        assert fleet.running()["fleet"] == supervisor
        assert "FULL" not in fedkeep("status", root)
    finally:
        assert fedkeep("stop", root) == "Stopped.\n"
    rounds = [line.round for line in read_run(record).rounds]
    assert rounds == list(range(1, len(rounds) + 1)), "each round once, none damaged"
