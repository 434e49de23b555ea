"""The device's side: Flower's quickstart with a Keeper."""

from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedkeep import Keeper
from keeper_app.task import MODS, TREES, arrivals, net

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train, inside the mod that the run asks for: mods of an app are chosen before its run."""
    chosen = MODS.get(str(context.run_config["client-mod"]))
    if chosen is None:
        return _train(msg, context)
    reply: Message = chosen(msg, context, _train)
    return reply


def _train(msg: Message, context: Context) -> Message:
    if str(context.run_config["strategy"]).startswith("FedXgb"):
        trees = ArrayRecord({"0": Array(np.frombuffer(TREES, dtype=np.uint8))})
        metrics = MetricRecord({"num-examples": 3})
        return Message(RecordDict({"arrays": trees, "metrics": metrics}), reply_to=msg)
    model = net()
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    x, y = arrivals(context.node_id, int(str(msg.content["config"]["server-round"])))
    with Keeper.open(context, net, capacity=6) as keeper:
        keeper.offer(x, y)
        keeper.sync(msg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    keeper.correct(model, optimizer)
    kept = keeper.samples()
    x, y = np.stack([sample for sample, _ in kept]), np.array([label for _, label in kept])
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y))
        torch.autograd.backward(loss)
        optimizer.step()
    records: dict[str, Any] = dict(keeper.records())
    metrics = MetricRecord({"num-examples": len(y), "train-loss": loss.item()})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics, **records}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Say how many of fresh samples the model gets right."""
    model = net()
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    x, y = arrivals(context.node_id, 999)
    right = float((model(torch.tensor(x)).argmax(1).numpy() == y).mean())
    metrics = MetricRecord({"num-examples": len(y), "accuracy": right, "eval_loss": 0.0})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
