"""FedAvg with Flower's own loop; it says how long each round took."""

import time

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Rounds without evaluation on the clients: one message per device and round, as in fedkeep."""
    devices = int(str(context.run_config["devices"]))
    last = time.monotonic()

    def note(server_round: int, _: ArrayRecord) -> MetricRecord | None:
        nonlocal last
        now = time.monotonic()
        print(f"round {server_round} seconds {now - last:.3f}", flush=True)
        last = now
        return None

    while len(list(grid.get_node_ids())) < devices:
        time.sleep(0.2)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=devices, min_available_nodes=devices)
    initial = ArrayRecord(torch.nn.Linear(30, 10).state_dict())
    rounds = int(str(context.run_config["rounds"]))
    strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=note)
