"""A client as in Flower's tutorials: a new torch process loads data and trains per message."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedkeep.data.synthetic import Demo

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Three epochs of full-batch SGD on the device's own samples."""
    model = torch.nn.Linear(30, 10)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    data = Demo(devices=int(str(context.run_config["devices"]))).load(seed=0)
    batch = data.train_batch(int(str(context.node_config["device"])))
    x, y = torch.tensor(batch.x), torch.tensor(batch.y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )
