"""examples/camera runs as its page says, and is as short as it says."""

import shutil
import time
from pathlib import Path

import pytest

from fedkeep.cli.agent_store import inspect
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.messages import SampleFilter, Status
from tests.agent.test_agent_process import ENVIRONMENT, outcome, running

pytest.importorskip("PIL", reason="Pillow is not installed")
EXAMPLE = Path(__file__).parents[2] / "examples" / "camera"


def test_the_camera_is_short() -> None:
    files = [EXAMPLE / "agent.toml", EXAMPLE / "camera.py"]
    assert sum(len(file.read_text().splitlines()) for file in files) < 40


def test_a_camera_with_daily_limits(tmp_path: Path) -> None:
    assert ENVIRONMENT
    for file in ("agent.toml", "camera.py"):
        shutil.copy(EXAMPLE / file, tmp_path)
    config = tmp_path / "agent.toml"
    config.write_text(config.read_text() + '\n[agent]\nsocket = "a.sock"\n')
    code, said = outcome(tmp_path, entry=("camera.py",))
    assert code == 0, said
    assert len(list((tmp_path / "pictures").rglob("*.jpg"))) == 200
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        status = settled(client, tmp_path)
        assert status.counters["seen"] == 200
        assert status.label_names == ("empty", "person")
        assert "daily_bytes allows" in status.uploads
        people = [
            one
            for part in client.pull_samples(SampleFilter(labels=("person",)))
            for one in part.samples
        ]
    assert people
    sent = list((tmp_path / "uploaded" / "person").glob("*.jpg"))
    assert sent
    assert sum(file.stat().st_size for file in sent) <= 10_000
    assert all(file.read_bytes() for file in sent)
    found = inspect(tmp_path / "camera.store")
    assert found.payloads is not None
    assert {one.data for one in people} <= set(found.payloads)
    assert (tmp_path / "camera.store").stat().st_size <= 1_000_000


def settled(client: AgentClient, folder: Path) -> Status:
    """Waits until every picture has its fate and the day's bytes are spent."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        status = client.status()
        if not list((folder / "pictures").rglob("*.jpg")) and "daily_bytes" in status.uploads:
            break
        time.sleep(0.1)
    return status
