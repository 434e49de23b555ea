"""A killed server resumes where it was; `python -m tests.faults.flower_table` runs the long form."""

from __future__ import annotations

from pathlib import Path

from tests.faults.server_kills import try_kills


def test_kill_nine_of_the_server_at_random_points(tmp_path: Path) -> None:
    tally = try_kills(tmp_path, kills=20)
    assert tally.kills >= 20
    assert tally.lost == 0
    assert tally.identical == tally.runs > 0
