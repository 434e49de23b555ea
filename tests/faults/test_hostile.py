"""Short forms of the sieges; `python -m tests.faults.agent_table` runs the long ones."""

from pathlib import Path

import pytest

from tests.faults.hostile import KINDS, besiege


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_records_end_no_source_and_keep_no_sound_sample_out(
    tmp_path: Path, kind: str
) -> None:
    siege = besiege(kind, tmp_path, {"folder": 1000, "socket": 3000}.get(kind, 10_000))
    assert siege.failures == 0
    assert siege.refused > 0.5 * siege.records
