"""A killed server resumes where it was; `python -m tests.faults.flower_table` is the long form."""

from pathlib import Path

from tests.faults.server_kills import try_kills


def test_kill_nine_of_the_server_at_random_points(tmp_path: Path) -> None:
    tally = try_kills(tmp_path, kills=20)
    assert tally.kills >= 20
    assert tally.lost == 0
    assert tally.identical == tally.runs > 0


def test_kill_nine_of_server_and_devices_in_the_middle_of_secure_sums(tmp_path: Path) -> None:
    tally = try_kills(tmp_path, kills=8, secure=True)
    assert tally.kills >= 8
    assert tally.lost == 0
    assert tally.identical == tally.runs > 0
