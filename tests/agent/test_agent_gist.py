"""A gist on an agent: what it reports, what it takes of the budget, and that it stays private."""

import os
import random
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedkeep
from fedkeep.agent.assembly import budget_for, parse_config
from fedkeep.agent.service import summarise
from fedkeep.cli.agent import explain
from fedkeep.cli.agent import gist as said
from fedkeep.core.types import LocalTraining, TrainOrder
from fedkeep.protocol.wire import to_bytes
from tests.agent.builders import AssembledAgent, assembled, config_table, feed, make_agent, order
from tests.faults.gist_kills import opened, participations

LOCAL: dict[str, Any] = {
    "policy": {"name": "balanced-reservoir"},
    "gist": {"mode": "local"},
    "store": {"budget": 130_000},
}


def plain_order(assembly: AssembledAgent, round_: int) -> TrainOrder:
    """As a server of plain federated averaging sends it."""
    return TrainOrder(
        round_, order(assembly, round_).model, None, LocalTraining(0.1, 2), None, None
    )


def test_status_and_metrics_tell_of_it(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from fedkeep.agent.service import Collector

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
    gauges = {
        metric.name: metric.samples[0] for metric in Collector(agent).collect() if metric.samples
    }
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
    assert (found.worth, found.arrivals, found.bytes, found.trust) == (
        now.worth,
        7,
        now.bytes,
        None,
    )


def test_without_one_nothing_is_told(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, gist={"mode": "none"})
    assert summarise(assembly.agent).gist is None
    assembly.disk.close()


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    ("policy", "name"),
    [("balanced-reservoir", "local"), ("balanced-reservoir", "shared"), ("ode", "local")],
)
def test_the_tightest_budget_holds_model_gist_and_window(
    tmp_path: Path, policy: str, name: str, encoding: str
) -> None:
    tables = {
        "model": {"name": "mlp", "hidden": [1500]},
        "gist": {"mode": name, "encoding": encoding},
    }
    table = config_table(tmp_path, policy={"name": policy}, **tables)
    table["store"]["budget"] = budget_for(parse_config(table), 4)
    assembly = assembled(table)
    agent = assembly.agent
    for round_ in range(4):
        feed(agent, 100 * round_, 40)
        given = order(assembly, round_)
        direction = (
            None if (policy, name) == ("balanced-reservoir", "local") else given.global_gradient
        )
        agent.participate(TrainOrder(round_, given.model, direction, LocalTraining(0.1, 2)))
    feed(agent, 900, 40)
    gist, window = agent.device.gist, agent.device.window
    assert gist is not None
    kept = gist.vector()
    assembly.disk.close()
    again = assembled(table)
    restored = again.agent.device
    again.disk.close()
    assert restored.gist is not None
    assert restored.gist.ess == gist.ess > 0
    assert restored.gist.vector() == pytest.approx(kept)
    assert restored.window.count == window.count == 40
    assert restored.window.mean() == pytest.approx(window.mean())


def test_shorter_encodings_leave_more_room(tmp_path: Path) -> None:
    def budget(encoding: str) -> int:
        tables = {
            "model": {"name": "mlp", "hidden": [3000]},
            "gist": {"mode": "local", "encoding": encoding},
        }
        return budget_for(parse_config(config_table(tmp_path, **tables)), 10)

    assert budget("float32") > budget("float16") > budget("int8")


def test_why_tells_of_the_draw(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, **LOCAL)
    store = assembly.agent.store
    told, capacity = {}, assembly.agent.device.capacity
    for first, last in ((0, 20), (20, 3 * capacity)):
        feed(assembly.agent, first, last - first)
        for id_ in range(first, last):
            for decision in store.log.about(id_):
                told[decision.verdict, decision.id == id_] = explain(decision, id_)
    assembly.disk.close()
    assert told["kept", True].startswith("kept with random key 0.")
    assert "had its slots, with higher keys in all of them" in told["refused", True]
    for own in (True, False):
        assert "the label most above its target gave its lowest key away" in told["replaced", own]


def test_kill_nine_leaves_model_and_gist_of_the_same_participation(tmp_path: Path) -> None:
    rng, told = random.Random(0), 0
    for _ in range(8):
        command = [sys.executable, "-m", "tests.faults.gist_kills", str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=around()) as process:
            assert process.stdout is not None
            told = int(process.stdout.readline())
            time.sleep(rng.uniform(0.0, 0.3))
            process.kill()
            told = max([told, *(int(line) for line in process.stdout if line.endswith("\n"))])
        found = opened(tmp_path)
        remembered, of_gist = participations(found)
        held = len(found.agent.store)
        found.disk.close()
        assert remembered == of_gist
        assert told <= remembered <= told + 1
        assert held > 0


def around() -> dict[str, str]:
    """The environment of a process that finds fedkeep and the tests."""
    places = [str(Path(fedkeep.__file__).parents[1]), str(Path(__file__).parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


@pytest.mark.parametrize("policy", ["balanced-reservoir", "fifo"])
def test_a_local_gist_leaves_messages_as_plain_federated_averaging_has_them(
    tmp_path: Path, policy: str
) -> None:
    sent = []
    for name in ("none", "local"):
        tables = {
            "policy": {"name": policy},
            "gist": {"mode": name},
            "store": {"path": str(tmp_path / name)},
        }
        assembly = make_agent(tmp_path, **tables)
        for round_ in range(2):
            feed(assembly.agent, 100 * round_, 30)
            asked = plain_order(assembly, round_)
            report = assembly.agent.participate(asked)
        assembly.disk.close()
        sent.append((to_bytes(asked), to_bytes(report), report))
    (plain_asked, plain_bytes, plain), (asked_bytes, report_bytes, report) = sent
    assert asked_bytes == plain_asked
    assert len(report_bytes) == len(plain_bytes)
    same = [f.name for f in fields(report) if f.name != "model"]
    assert [getattr(report, name) for name in same] == [getattr(plain, name) for name in same]
    assert not np.array_equal(report.model, plain.model), "the gist did something"
