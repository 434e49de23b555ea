"""A served fleet of agent processes that predicts a number: rounds, plan, record and its page."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedkeep.config.agreement import agreement_of, check_agreement
from fedkeep.config.method import parse_method
from fedkeep.core.errors import RejectedError
from fedkeep.core.rounds import merge_evaluations
from fedkeep.core.targets import NumberTargets, error_sums
from fedkeep.flower import codec
from fedkeep.flower.client_app import app
from fedkeep.flower.server_app import open_fleet
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.messages import Evaluated
from fedkeep.records import read_run
from fedkeep.records.lines import HoldingsLine, Members
from tests.agent.test_agent_process import running
from tests.flower.in_process import InProcessGrid, make_node

AGENT = """
preset = "paper"
[samples]
shape = [4]
targets = "number"
edges = [30.0, 50.0]
[policy]
name = "ode"
[model]
name = "linear"
loss = "huber"
centre = 40.0
scale = 10.0
[store]
path = "a.store"
budget = 100_000
[agent]
socket = "a.sock"
[[source]]
kind = "lines"
path = "in.jsonl"
"""
FLEET = {
    "preset": "paper",
    "samples.shape": "[4]",
    "samples.targets": "number",
    "samples.edges": "[30.0, 50.0]",
    "policy.name": "ode",
    "model.name": "linear",
    "model.loss": "huber",
    "model.centre": 40.0,
    "model.scale": 10.0,
    "train.learning-rate": 0.3,
    "train.participation": 1.0,
    "rounds.evaluate-every": 1,
}


@contextmanager
def agent(folder: Path, number: int) -> Iterator[Path]:
    folder.mkdir()
    rng = np.random.default_rng(number)
    x = rng.normal(size=(200, 4))
    y = 40 + 8 * x[:, 0] - 5 * x[:, 1] + rng.normal(size=200)
    rows = zip(x.tolist(), y.tolist(), strict=True)
    (folder / "in.jsonl").write_text("".join(json.dumps({"x": a, "y": b}) + "\n" for a, b in rows))
    (folder / "agent.toml").write_text(AGENT)
    with running(folder, "agent.toml"):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with AgentClient(str(folder / "a.sock")) as client:
                if client.status().counters.get("seen") == 200:
                    break
            time.sleep(0.1)
        yield folder / "a.sock"


def test_agents_learn_a_number_and_the_record_has_r2_and_rmse(tmp_path: Path) -> None:
    config = {**FLEET, "records.directory": str(tmp_path / "records"), "state.run": "meters"}
    with ExitStack() as agents:
        sockets = [agents.enter_context(agent(tmp_path / f"a{n}", n)) for n in range(2)]
        nodes = [make_node(number, app, config) for number in range(2)]
        for node, socket in zip(nodes, sockets, strict=True):
            node.context.node_config["agent-socket"] = str(socket)
        strategy = open_fleet(config)
        outcomes = list(strategy.rounds(InProcessGrid(nodes), 12))
    assert not outcomes[-1].rejections
    [path] = (tmp_path / "records").rglob("meters.jsonl")
    run = read_run(path)
    assert run.header.measure == "r2"
    assert run.header.labels == ("below 30", "30 to 50", "50 and more")
    last = run.evaluations[-1]
    assert last.accuracy is not None
    assert last.accuracy > 0.7
    assert last.rmse is not None
    assert last.rmse < 6
    assert last.mae is not None
    assert last.mae < last.rmse
    assert {len(row) for row in run.of(HoldingsLine)[-1].filled} == {3}
    assert all(member.accuracy for member in run.of(Members)[-1].members)


def test_a_device_with_other_edges_is_refused_in_words() -> None:
    method = parse_method({"policy": {"name": "ode"}, "preset": "paper"})
    own, fleets = (
        agreement_of(method, 3, NumberTargets(edges)) for edges in ((30.0, 50.0), (30.0, 60.0))
    )
    with pytest.raises(RejectedError) as refusal:
        check_agreement(fleets, own)
    said = "samples.edges is '[30.0, 50.0]' on the device, '[30.0, 60.0]' in the fleet"
    assert said in refusal.value.detail
    with pytest.raises(RejectedError) as refusal:
        check_agreement(fleets, agreement_of(method, 3))
    assert "samples.targets is 'class' on the device, 'number'" in refusal.value.detail


def test_scores_of_several_devices_are_those_of_all_their_samples() -> None:
    rng = np.random.default_rng(0)
    y, predicted = rng.normal(5, 3, 30), rng.normal(5, 3, 30)
    parts = (slice(0, 10), slice(10, 30))
    sums = {n: error_sums(predicted[part], y[part]).tolist() for n, part in enumerate(parts)}
    told = {n: (part.stop - part.start, 1.0, 0) for n, part in enumerate(parts)}
    merged, _ = merge_evaluations(told, capped=False, errors=sums)
    off = predicted - y
    assert merged["rmse"] == pytest.approx(np.sqrt((off**2).mean()))
    assert merged["mae"] == pytest.approx(np.abs(off).mean())
    assert (
        merged["r2"] == merged["accuracy"] == pytest.approx(max(-1, 1 - (off**2).mean() / y.var()))
    )


@pytest.mark.parametrize(
    "errors", [(-1.0, 0.0, 0.0, 0.0), (float("nan"), 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, float("inf"))]
)
def test_sums_that_cannot_be_are_rejected(errors: tuple[float, float, float, float]) -> None:
    from fedkeep.core.errors import RejectedError

    with pytest.raises(RejectedError, match="errors of"):
        codec.decode_evaluation(codec.encode(Evaluated(4, 2.0, 0, errors=errors)))


def test_a_device_without_sums_counts_as_the_worst_in_the_robust_score() -> None:
    y = np.arange(10.0)
    sums = dict.fromkeys(range(4), error_sums(y, y).tolist())
    merged, _ = merge_evaluations(dict.fromkeys(range(5), (10, 1.0, 0)), errors=sums)
    assert merged["r2"] == 1.0
    assert merged["accuracy_robust"] == 1.0
