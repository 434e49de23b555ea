"""Lost replies cost accuracy, never a round; `python -m tests.faults.flower_table` has them all."""

import pytest

from tests.faults.dropouts import DEADLINE, try_dropout


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_no_round_stalls_however_many_replies_are_lost(share: float) -> None:
    whole, dropped = try_dropout(0.0, seed=1), try_dropout(share, seed=1)
    assert dropped.rounds == whole.rounds == 10
    assert dropped.longest < whole.longest + DEADLINE + 5
    assert dropped.accuracy > whole.accuracy - 0.25
