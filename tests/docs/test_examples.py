"""The examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("quickstart.py", "balanced-reservoir stores, per label"),
        ("new_policy.py", "unsure"),
        ("on_device.py", "round 4: trained on"),
        ("engines.py", "label 2: "),
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
