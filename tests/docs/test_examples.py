"""The examples run as they stand."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedkeep.protocol.client import AgentClient, AgentUnreachableError
from fedkeep.records import read_runs

ROOT = Path(__file__).parents[2]


def run(*command: str, at: Path = ROOT) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=at,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def fed_to_the_agent(records: str, folder: Path) -> dict[str, int]:
    """Run the agent until it has seen all records; return what it counted."""
    command = [sys.executable, "-m", "fedkeep", "agent", "run", "agent.toml"]
    agent = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, text=True)
    try:
        assert agent.stdin is not None
        agent.stdin.write(records)
        agent.stdin.close()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            time.sleep(0.2)
            with contextlib.suppress(AgentUnreachableError):
                with AgentClient(str(folder / "fedkeep.sock")) as client:
                    counts = client.status().counters
                if counts.get("seen") == len(records.splitlines()):
                    break
        refused = sum(count for name, count in counts.items() if name.startswith("refused.label"))
        return {"seen": counts["seen"], "refused": refused}
    finally:
        agent.terminate()
        agent.wait(120)


def test_a_meter_with_regression_in_simulation_and_on_a_device(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "examples" / "meter", tmp_path / "meter")
    files = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.*")}
    assert files["readings.py"] + max(files["agent.toml"], files["experiment.toml"]) < 40
    played = run(
        "-m", "fedkeep", "run", "experiment.toml", "--out", "runs", "--jobs", "1", at=folder
    )
    assert "final R2" in played
    kept = fed_to_the_agent(run("readings.py", at=folder), folder)
    assert kept == {"seen": 400, "refused": 0}
    shown = run("-m", "fedkeep", "agent", "store", "show", "fedkeep.store", at=folder)
    assert "interval 0:" in shown
    assert "interval 3:" in shown


def test_several_labels_a_sample_by_a_loss_of_ones_own(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "examples" / "multi_label", tmp_path / "multi_label")
    lines = [
        len((folder / name).read_text().splitlines()) for name in ("alarms.py", "experiment.toml")
    ]
    assert sum(lines) < 40
    run("-m", "fedkeep", "run", "experiment.toml", "--out", "runs", "--jobs", "1", at=folder)
    runs = read_runs(folder / "runs")
    last = {found.header.method: found.evaluations[-1] for found in runs}
    assert last.keys() == {"fifo", "gist-local"}
    assert min(e.accuracy for e in last.values() if e.accuracy is not None) > 0.4


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("quickstart.py", "balanced-reservoir stores, per label"),
        ("new_policy.py", "unsure"),
        ("on_device.py", "round 4: trained on"),
        ("engines.py", "label failing: "),
        ("fedboost.py", "every other one taught wrong: 0."),
    ],
)
def test_the_example_runs(example: str, says: str) -> None:
    assert says in run(f"examples/{example}")


def test_engines_take_under_forty_lines() -> None:
    assert len((ROOT / "examples" / "engines.py").read_text().splitlines()) < 40


def test_a_new_policy_takes_under_forty_lines_and_passes_the_checks() -> None:
    source = (ROOT / "examples" / "new_policy.py").read_text()
    assert len(source.splitlines()) < 40
    assert "ok       chunking" in run("-m", "fedkeep", "check", "examples/new_policy.py:Unsure")
