"""Keepers that send sketches: few bytes, none that contradicts itself, updates compared in them."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedkeep.core.errors import RejectedError
from fedkeep.core.gradients.codec import PackedVector, pack, unpack
from fedkeep.flower import Keeper, KeeperStrategy
from fedkeep.flower.keeper_records import (
    GRADIENT,
    KEEPER,
    RANK,
    encode,
    gradient_fields,
    read_gradient,
)
from tests.flower.in_process import InProcessGrid, make_node

FEATURES, LABELS = 60, 4
CENTRES = np.random.default_rng(0).standard_normal((LABELS, FEATURES)).astype(np.float32)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 40), torch.nn.ReLU(), torch.nn.Linear(40, LABELS)
    )


def make_app(gist: dict[str, object]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        rng = np.random.default_rng(
            (context.node_id, int(str(msg.content["config"]["server-round"])))
        )
        y = rng.integers(0, LABELS, 32)
        x = CENTRES[y] + rng.standard_normal((32, FEATURES)).astype(np.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Keeper.open(context, net, 8, gist=gist) as keeper:
            keeper.offer(x, y)
            keeper.sync(msg)
            kept = keeper.samples()
            keeper.correct(model, optimizer)
            inputs = torch.tensor(np.stack([x for x, _ in kept]))
            labels = torch.tensor([y for _, y in kept])
            for _ in range(3):
                optimizer.zero_grad()
                torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
                optimizer.step()
            records = keeper.records()
        metrics = MetricRecord({"num-examples": len(kept)})
        content = RecordDict(
            {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics, **records}
        )
        return Message(content, reply_to=msg)

    return app


@pytest.mark.parametrize("encoding", ["float32", "int8", "int4"])
def test_a_sketch_goes_round_and_one_that_contradicts_itself_does_not_count(
    encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest = make_app({"mode": "shared", "rank": 4, "encoding": encoding})
    sizes, told = set[int](), set[int]()

    def forging(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        about = reply.content[KEEPER]
        assert isinstance(about, ConfigRecord)
        if GRADIENT in about:
            gradient = read_gradient(about)
            sizes.add(len(gradient))
            told.add(int(str(about[RANK])))
            if context.node_id == 1002:
                forged = np.array(gradient)
                forged[: 4 * FEATURES] *= -1
                for key in [key for key in about if str(key).startswith("gradient_")]:
                    del about[key]
                about[GRADIENT] = encode(forged)
        return reply

    grid = InProcessGrid([make_node(number, forging, {}) for number in range(4)])
    strategy = KeeperStrategy(FedAvg(fraction_evaluate=0.0))
    strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=4)  # type: ignore[arg-type]
    assert (sizes, told) == ({4 * 60 + 9 * 40 + 40 + 4 * 40 + 4}, {4})
    rejected = [line for line in caplog.text.splitlines() if "rejected: " in line]
    assert rejected
    assert all("device 1002 rejected: estimator-contradicts: " in line for line in rejected)


def test_a_gradient_travels_in_its_own_encoding() -> None:
    rng = np.random.default_rng(0)
    vector = rng.standard_normal(301).astype(np.float32)
    for encoding, size in (
        ("float32", 4 * 301),
        ("float16", 2 * 301),
        ("int8", 301),
        ("int4", 151),
    ):
        sent = unpack(pack(vector, encoding, 0), 301)  # type: ignore[arg-type]
        fields = gradient_fields(sent)
        raw = fields[GRADIENT]
        assert isinstance(raw, bytes)
        assert len(raw) == size
        found = read_gradient(ConfigRecord(fields))  # type: ignore[arg-type]
        assert found.tolist() == sent.tolist()
        assert isinstance(found, PackedVector) == (encoding != "float32")


@pytest.mark.parametrize(
    "change",
    [
        {"gradient_length": 302},
        {"gradient_length": -1},
        {"gradient_encoding": "int64"},
        {"gradient_scales": b"1234"},
        {"gradient_length": 10**12},
    ],
)
def test_parts_that_do_not_fit_each_other_are_rejected(change: dict[str, object]) -> None:
    vector = np.ones(301, dtype=np.float32)
    fields = gradient_fields(unpack(pack(vector, "int8", 0), 301))
    with pytest.raises(RejectedError, match="malformed"):
        read_gradient(ConfigRecord(fields | change))  # type: ignore[arg-type, operator]
