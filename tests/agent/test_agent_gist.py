"""A gist on an agent: what it says of itself, what it takes of the budget, and that it is nobody else's business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.agent.assembly import Assembly, assemble, budget_for, parse_config
from fedkeep.agent.service import _reason
from fedkeep.agent.summary import summarise
from fedkeep.cli.agent import explain
from fedkeep.cli.agent import gist as said
from fedkeep.core.types import Assignment, LocalTraining, TrainOrder
from tests.agent.builders import config_table, feed, make_agent, order

LOCAL: dict[str, Any] = {"policy": {"name": "draw"}, "gist": {"name": "local"}, "store": {"budget": 130_000}}


def plain_order(assembly: Assembly, round_: int) -> TrainOrder:
    """As a server of plain federated averaging sends it."""
    return TrainOrder(round_, order(assembly, round_).model, None, LocalTraining(0.1, 2), None, None)


def test_status_and_metrics_tell_of_it(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from fedkeep.agent.metrics import Collector

    assembly = make_agent(tmp_path, **LOCAL)
    agent = assembly.agent
    first = summarise(agent).gist
    assert first is not None
    assert said(first).startswith("local, nothing known yet; 0 arrivals to be taken in, ")
    for round_ in range(2):
        feed(agent, 100 * round_, 30)
        agent.participate(plain_order(assembly, round_))
    feed(agent, 500, 7)
    now, size = summarise(agent).gist, agent.device.learner.gradient_size
    gauges = {metric.name: metric.samples[0] for metric in Collector(agent).collect() if metric.samples}
    assembly.disk.close()
    assert now is not None
    assert (now.name, now.arrivals, now.bytes) == ("local", 7, 4 * size + 8 * (size + 3))
    assert now.worth > 0
    assert now.trust is not None
    assert 0 <= now.trust <= 1
    assert "worth" in said(now)
    assert "trust" in said(now)
    for name in ("worth", "arrivals", "bytes", "trust", "likeness", "reach"):
        assert gauges[f"fedkeep_gist_{name}"].value == pytest.approx(getattr(now, name))
        assert gauges[f"fedkeep_gist_{name}"].labels == {"form": "local"}
    again = make_agent(tmp_path, **LOCAL)
    found = summarise(again.agent).gist
    again.disk.close()
    assert found is not None
    assert (found.worth, found.arrivals, found.bytes, found.trust) == (now.worth, 7, now.bytes, None)


def test_without_one_nothing_is_told(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, gist={"name": "none"})
    assert summarise(assembly.agent).gist is None
    assembly.disk.close()


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8"])
@pytest.mark.parametrize(("policy", "name"), [("draw", "local"), ("draw", "shared"), ("ode", "local")])
def test_the_tightest_budget_holds_model_gist_and_window(tmp_path: Path, policy: str, name: str, encoding: str) -> None:
    tables = {"model": {"name": "mlp", "hidden": [1500]}, "gist": {"name": name, "encoding": encoding}}
    table = config_table(tmp_path, policy={"name": policy}, **tables)
    table["store"]["budget"] = budget_for(parse_config(table), 4)
    assembly = assemble(parse_config(table))
    agent = assembly.agent
    for round_ in range(4):
        feed(agent, 100 * round_, 40)
        given = order(assembly, round_)
        direction = None if (policy, name) == ("draw", "local") else given.direction
        agent.participate(TrainOrder(round_, given.model, direction, LocalTraining(0.1, 2)))
    feed(agent, 900, 40)
    gist, window = agent.device.gist, agent.device.window
    assert gist is not None
    kept = gist.vector()
    assembly.disk.close()
    again = assemble(parse_config(table))
    restored = again.agent.device
    again.disk.close()
    assert restored.gist is not None
    assert restored.gist.worth == gist.worth > 0
    assert restored.gist.vector() == pytest.approx(kept)
    assert restored.window.count == window.count == 40
    assert restored.window.mean() == pytest.approx(window.mean())


@pytest.mark.parametrize("policy", ["draw", "ode"])
def test_what_is_kept_for_each_of_many_labels_is_in_the_budget(tmp_path: Path, policy: str) -> None:
    table = config_table(tmp_path, policy={"name": policy}, gist={"name": "local"}, samples={"labels": 1000})
    table["store"]["budget"] = budget_for(parse_config(table), 4)
    assembly = assemble(parse_config(table))
    plan = Assignment(np.repeat([1, 0], [4, 996]), np.ones(1000), 1.0)
    for round_ in range(3):
        feed(assembly.agent, 100 * round_, 20)
        assembly.agent.profile()
        given = order(assembly, round_)
        direction, assigned = (given.direction, plan) if policy == "ode" else (None, None)
        assembly.agent.participate(TrainOrder(round_, given.model, direction, given.local, None, assigned))
    assembly.disk.close()


def test_shorter_encodings_leave_more_room(tmp_path: Path) -> None:
    def budget(encoding: str) -> int:
        tables = {"model": {"name": "mlp", "hidden": [3000]}, "gist": {"name": "local", "encoding": encoding}}
        return budget_for(parse_config(config_table(tmp_path, **tables)), 10)

    assert budget("float32") > budget("float16") > budget("int8")


def test_why_tells_of_the_draw(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, **LOCAL)
    store = assembly.agent.store
    told, capacity = {}, assembly.layout.capacity
    for first, last in ((0, 20), (20, 3 * capacity)):
        feed(assembly.agent, first, last - first)
        for id_ in range(first, last):
            for decision in store.log.about(id_):
                told[decision.verdict.name, decision.id == id_] = explain(_reason(decision), id_)
    assembly.disk.close()
    assert told["KEPT", True].startswith("kept with random key 0.")
    assert "had its slots, with higher keys in all of them" in told["REFUSED", True]
    for own in (True, False):
        assert "the label most above its target gave its lowest key away" in told["REPLACED", own]
