"""Agents and stores for tests, small and quick to make."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import assemble, parse_config
from fedkeep.agent.cellfile import FileDisk
from fedkeep.core.types import Assignment, LocalTraining, TrainOrder, Vector

SHAPE, LABELS = (6,), 3


def config_table(folder: Path, **tables: Any) -> dict[str, Any]:
    """A configuration for six numbers and three labels, under a policy with a server's plan."""
    table: dict[str, Any] = {
        "policy": {"name": "ode"},
        "samples": {"shape": list(SHAPE), "labels": LABELS},
        "store": {"path": str(folder / "a.store"), "budget": 100_000, "log_length": 64},
        "agent": {"socket": str(folder / "a.sock"), "nice": 0},
    }
    for name, changes in tables.items():
        table[name] = {**table.get(name, {}), **changes} if isinstance(changes, dict) else changes
    return table


class AssembledAgent(NamedTuple):
    agent: Agent
    disk: FileDisk


def assembled(table: dict[str, Any]) -> AssembledAgent:
    agent = assemble(parse_config(table))
    return AssembledAgent(agent, agent.store.file.disk)


def make_agent(folder: Path, **tables: Any) -> AssembledAgent:
    return assembled(config_table(folder, **tables))


def arrival(id_: int, label: int | None = None, source: str = "test") -> Arrival:
    x = np.random.default_rng(id_).standard_normal(SHAPE).astype(np.float32)
    return Arrival(x, id_ % LABELS if label is None else label, id_, source)


def feed(agent: Agent, first: int, count: int, source: str = "test") -> None:
    """Offers samples and has them judged and committed."""
    for id_ in range(first, first + count):
        agent.intake.offer(arrival(id_, source=source), wait=True)
        if len(agent.intake) >= 8:
            agent.step(0.0)
    while agent.step(0.0):
        pass
    assert agent.commit()


def order(
    assembly: AssembledAgent, round_: int = 0, quota: int = 4, direction: bool = True
) -> TrainOrder:
    learner = assembly.agent.device.learner
    rng = np.random.default_rng(round_)
    model: Vector = rng.standard_normal(learner.size).astype(np.float32)
    pull: Vector | None = (
        rng.standard_normal(learner.gradient_size).astype(np.float32) if direction else None
    )
    plan = Assignment(np.full(LABELS, quota), np.ones(LABELS), 1.0)
    return TrainOrder(round_, model, pull, LocalTraining(0.1, 2), None, plan)
