"""An existing app, FedAvg and torch and all, adopts fedkeep by a Keeper and a wrapper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedkeep.flower import Keeper, Keeping
from fedkeep.flower.in_process import InProcessGrid, make_node
from fedkeep.flower.keeper import DIRECTION, ESTIMATE

CENTRES = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32) * 2


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def arrivals(node: int, round_: int, n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((node, round_))
    y = rng.integers(0, 3, n)
    return CENTRES[y] + rng.normal(size=(n, 5)).astype(np.float32), y


def make_app(capacity: int = 9, directory: str | None = None) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        with Keeper.open(context, net, capacity, directory=directory) as keeper:
            keeper.offer(*arrivals(context.node_id, int(msg.content["config"]["server-round"])))
            keeper.sync(msg)
            kept = keeper.samples()
        x, y = torch.tensor(np.stack([x for x, _ in kept])), torch.tensor([y for _, y in kept])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(kept)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics, **keeper.records()})
        return Message(content, reply_to=msg)

    return app


def accuracy(arrays: ArrayRecord) -> float:
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = arrivals(99, 99, 600)
    return float((model(torch.tensor(x)).argmax(1).numpy() == y).mean())


def make_grid(app: ClientApp) -> InProcessGrid:
    return InProcessGrid([make_node(number, app, {}) for number in range(4)])


def test_fedavg_trains_on_what_was_kept_and_directions_go_round() -> None:
    app, directions = make_app(), []

    def watched(message: Message, context: Context) -> Message:
        directions.append(DIRECTION in message.content)
        return app(message, context)

    strategy = Keeping(FedAvg(fraction_evaluate=0.0))
    initial = ArrayRecord(net().state_dict())
    result = strategy.start(make_grid(watched), initial, num_rounds=8)  # type: ignore[arg-type]
    assert accuracy(result.arrays) > max(0.8, accuracy(initial))
    assert directions[:8] == [False] * 8
    assert all(directions[8:])


def test_no_more_is_kept_than_the_capacity(tmp_path: Path) -> None:
    node = make_node(0, make_app(), {})
    with Keeper.open(node.context, net, 7, directory=str(tmp_path)) as keeper:
        keeper.offer(*arrivals(0, 0, 100))
        keeper.sync(ArrayRecord(net().state_dict()))
        assert len(keeper.samples()) == 7


@pytest.mark.parametrize("durable", [True, False])
def test_a_keeper_remembers_between_two_messages(tmp_path: Path, durable: bool) -> None:
    context = make_node(0, make_app(), {}).context
    directory = str(tmp_path) if durable else None
    with Keeper.open(context, net, 7, directory=directory) as keeper:
        keeper.offer(*arrivals(0, 0, 50))
        keeper.sync(ArrayRecord(net().state_dict()))
        before = sorted(y for _, y in keeper.samples())
    with Keeper.open(context, net, 7, directory=directory) as keeper:
        assert sorted(y for _, y in keeper.samples()) == before


def test_a_keeper_that_failed_is_not_saved(tmp_path: Path) -> None:
    context = make_node(0, make_app(), {}).context

    def fail() -> None:
        with Keeper.open(context, net, 7, directory=str(tmp_path)) as keeper:
            keeper.offer(*arrivals(0, 0, 50))
            raise TimeoutError

    with pytest.raises(TimeoutError):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_sample_offered_again_is_the_same_sample() -> None:
    context = make_node(0, make_app(), {}).context
    with Keeper.open(context, net, 50) as keeper:
        for _ in range(3):
            keeper.offer(*arrivals(0, 0, 20))
        assert len(keeper.samples()) == 20


@pytest.mark.parametrize("bad", [np.full(67, np.nan), np.zeros(3), np.full(67, 1e30), np.zeros((67, 1))])
def test_a_bad_estimate_is_dropped_and_training_goes_on(bad: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    honest = make_app()

    def liar(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if context.node_id == 1002 and ESTIMATE in reply.content:
            reply.content[ESTIMATE] = ArrayRecord({"local_gradient": Array(bad.astype(np.float32))})
        return reply

    strategy = Keeping(FedAvg(fraction_evaluate=0.0))
    result = strategy.start(make_grid(liar), ArrayRecord(net().state_dict()), num_rounds=4)  # type: ignore[arg-type]
    assert np.isfinite(result.arrays["0.weight"].numpy()).all()
    assert "node 1002: estimate refused" in caplog.text


def test_the_documented_difference_is_at_most_ten_lines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    diff = page.split("```diff")[1].split("```")[0].splitlines()
    assert 0 < sum(line.startswith("+") for line in diff) <= 10
