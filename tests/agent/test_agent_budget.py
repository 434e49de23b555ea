"""Whatever the shape, model and budget: a full store has room for the largest possible commit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.agent.arrivals import Arrival
from fedkeep.core.errors import ConfigError
from fedkeep.core.types import Assignment, LocalTraining, TrainOrder
from tests.agent.builders import assembled

CASES = [
    ((4,), 2, 100_000, {}),
    ((60,), 10, 150_000, {"log_length": 0}),
    ((900,), 5, 700_000, {}),
    ((3, 64), 20, 900_000, {"log_length": 2000}),
    ((60,), 10, 200_000, {"key_env": "TEST_STORE_KEY"}),
]


@pytest.mark.parametrize(("shape", "labels", "budget", "store"), CASES)
@pytest.mark.parametrize("policy", ["ode", "fedbalancer", "fifo"])
def test_the_largest_commit_fits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    labels: int,
    budget: int,
    store: dict[str, Any],
    policy: str,
) -> None:
    monkeypatch.setenv("TEST_STORE_KEY", "0f" * 32)
    table = {
        "samples": {"shape": list(shape), "labels": labels},
        "policy": {"name": policy},
        "store": {"path": str(tmp_path / "s"), "budget": budget, "commit_ms": 10_000, **store},
    }
    assembly = assembled(table)
    agent, rng, id_ = assembly.agent, np.random.default_rng(0), 0
    size, regions = agent.device.learner.size, agent.device.regions.count
    for round_ in range(4):
        for _ in range(2 * agent.device.capacity):
            x = rng.standard_normal(shape).astype(np.float32)
            agent.intake.offer(Arrival(x, id_ % labels, id_, "a" * 50), wait=True)
            id_ += 1
            if len(agent.intake) >= 64:
                agent.step(0.0)
        quotas = np.full(regions, agent.device.capacity // regions)
        model, direction = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
        plan = Assignment(quotas, np.ones(regions), 1.0)
        agent.participate(TrainOrder(round_, model, direction, LocalTraining(0.01, 1), None, plan))
        assert (tmp_path / "s").stat().st_size <= budget
    assert len(agent.store) > 0
    held = agent.store.stored().batch.ids.tolist()
    assembly.disk.close()
    again = assembled(table)
    assert again.agent.store.stored().batch.ids.tolist() == held
    again.disk.close()


def test_a_budget_that_holds_nothing_says_what_it_needs(tmp_path: Path) -> None:
    table = {
        "samples": {"shape": [900], "labels": 5},
        "model": {"name": "mlp"},
        "store": {"path": str(tmp_path / "s"), "budget": 100_000},
    }
    with pytest.raises(
        ConfigError, match=r"holds no sample beside the model: it needs (\d+)"
    ) as refusal:
        assembled(table)
    table["store"]["budget"] = int(str(refusal.value).split()[-1])  # type: ignore[index]
    assembly = assembled(table)
    assert assembly.agent.device.capacity >= 1
    assembly.disk.close()
