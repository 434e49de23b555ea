"""The ledger never counts less than what left the device, however often the device is killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("dp_accounting", reason="needs the privacy extra")


def run(tmp_path: Path, kills: int, order: str) -> dict[str, int]:
    script = Path(__file__).with_name("killed_sender.py")
    command = [sys.executable, str(script), str(tmp_path / "ledger"), str(kills), order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    result: dict[str, int] = json.loads(done.stdout)
    return result


def test_two_hundred_kills_never_under_count(tmp_path: Path) -> None:
    result = run(tmp_path, 200, "charge-first")
    assert result["undercounts"] == 0
    assert result["sent"] > 150, "the children lived too short to send anything"
    assert result["charged"] <= result["sent"] + 200, "at most one charge a kill is lost"


def test_the_kills_would_catch_a_ledger_charged_after_sending(tmp_path: Path) -> None:
    assert run(tmp_path, 20, "send-first")["undercounts"] > 0
