"""A bad update never counts, never ends the run, and its sender is named."""

import logging

import numpy as np
import pytest

from fedkeep.flower.rounds import RoundOptions
from tests.faults.bad_updates import FAULTS, PARTS, Part, spoiled
from tests.flower.small_fleet import SmallFleet

OPTIONS = RoundOptions(participation=1.0, deadline=0.5, quorum=0.5)
OFFENDER = 3


@pytest.fixture(scope="module")
def clean() -> float:
    fleet = SmallFleet(devices=8, rounds=4, options=OPTIONS)
    strategy = fleet.strategy()
    list(strategy.rounds(fleet.grid(), 4))
    return fleet.accuracy(strategy)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fault", [*FAULTS, "duplicate"])
def test_the_run_goes_on_and_the_offender_is_named(
    fault: str, part: Part, clean: float, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = SmallFleet(devices=8, rounds=4, options=OPTIONS)
    fleet.apps[OFFENDER] = spoiled(fleet.apps[OFFENDER], fault, part)
    strategy = fleet.strategy()
    with caplog.at_level(logging.WARNING, "fedkeep.flower"):
        outcomes = list(strategy.rounds(fleet.grid(), 4))
    named = {refusal.device for outcome in outcomes for refusal in outcome.rejections}
    in_metrics = {device for outcome in outcomes for device in outcome.metrics()["rejected"]}  # type: ignore[union-attr]
    harmless = (fault, part) == ("zeros", "profile")
    assert len(outcomes) == 4
    assert all(outcome.quorate for outcome in outcomes)
    assert np.isfinite(strategy.server.model).all()
    assert fleet.accuracy(strategy) > clean - 0.1
    assert named <= {OFFENDER, 1000 + OFFENDER}
    assert bool(named) != harmless
    assert named == in_metrics
    assert any(f"{OFFENDER}" in record.getMessage() for record in caplog.records)
