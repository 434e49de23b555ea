"""Short form of the store's fault tests; `python -m tests.faults.agent_table` has the long ones."""

from pathlib import Path

import pytest

from tests.faults import agents, light, torn
from tests.faults.corruption import KINDS, try_corruptions
from tests.faults.full_disk import try_every_call
from tests.faults.kills import POINTS, try_kills
from tests.faults.power_loss import try_power_cuts
from tests.faults.resizes import resize


def test_killed_processes_lose_nothing_acknowledged(tmp_path: Path) -> None:
    tally = try_kills(tmp_path / "store", kills=4 * len(POINTS))
    assert (tally.kills, tally.lost, tally.wrong) == (4 * len(POINTS), 0, 0)


def test_power_cuts_lose_nothing_acknowledged() -> None:
    losses = try_power_cuts(steps=60, states=300)
    assert (losses.lost, losses.wrong) == (0, 0)


def test_samples_committed_alone_survive_kills_and_power_cuts(tmp_path: Path) -> None:
    killed = light.try_kills(tmp_path / "store", kills=25)
    assert (killed.tried, killed.lost, killed.wrong) == (25, 0, 0)
    cut = light.try_power_cuts(steps=120, states=200)
    assert (cut.tried, cut.lost, cut.wrong) == (200, 0, 0)


@pytest.mark.parametrize("kind", agents.KINDS)
def test_power_cuts_cost_no_file_no_late_label_and_nothing_that_a_rule_holds(
    kind: str, tmp_path: Path
) -> None:
    losses = agents.try_power_cuts(kind, tmp_path, steps=60, states=120)
    assert (losses.states, losses.lost, losses.wrong) == (120, 0, 0)


def test_resizing_loses_nothing(tmp_path: Path) -> None:
    assert resize(tmp_path, times=12) == (12, 0)


def test_a_disk_full_at_any_call_loses_nothing_and_recovers() -> None:
    failures = try_every_call(steps=20)
    assert failures.calls > 60
    assert (failures.lost, failures.wrong, failures.stuck) == (0, 0, 0)


def test_damage_costs_only_what_it_hits(tmp_path: Path) -> None:
    salvage = try_corruptions(tmp_path, count=30 * len(KINDS))
    assert (salvage.crashes, salvage.wrong) == (0, 0)
    assert salvage.saved_percent >= 99


@pytest.mark.parametrize(("sector", "block"), [(None, None), (512, 512)])
def test_no_crash_state_of_a_short_history_loses_what_was_acknowledged(
    sector: int | None, block: int | None
) -> None:
    whole = torn.try_all(sector, block, first=17, steps=2)
    assert whole.states > 200
    assert (whole.lost, whole.wrong) == (0, 0)
    alone = torn.try_all_light(sector, block, first=12, steps=2)
    assert alone.states > 20
    assert (alone.lost, alone.wrong) == (0, 0)


def test_without_sectors_a_torn_block_costs_what_shares_it() -> None:
    assert torn.try_all_light(None, 4096, first=12, steps=2).lost > 0


@pytest.mark.parametrize("budgets", [(100_000, 140_000), (140_000, 100_000)])
def test_no_crash_state_of_a_change_of_budget_loses_anything(
    tmp_path: Path, budgets: tuple[int, int]
) -> None:
    losses = torn.try_resizes(tmp_path, budgets, 4096)
    assert losses.states > 100
    assert (losses.lost, losses.wrong) == (0, 0)
