"""The server's side: any strategy of Flower's inside KeeperStrategy."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedkeep import KeeperStrategy
from keeper_app.task import net, strategy_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play the rounds, and write down what came of them."""
    config = context.run_config
    name = str(config["strategy"])
    trees = name.startswith("FedXgb")
    arrays = (
        ArrayRecord({"0": Array(np.frombuffer(b"", dtype=np.uint8))})
        if trees
        else ArrayRecord(net().state_dict())
    )
    strategy = KeeperStrategy(strategy_of(name, int(str(config["nodes"]))), deadline=600.0)
    rounds = int(str(config["rounds"]))
    result = strategy.start(grid, arrays, num_rounds=rounds)
    train = result.train_metrics_clientapp
    evaluated = result.evaluate_metrics_clientapp
    found = {
        "rounds": len(train) if not trees else rounds * bool(result.arrays),
        "errors": sum(int(str(line.get("keeper-errors", 0))) for line in train.values()),
        "estimates": [int(str(line.get("keeper-estimates", 0))) for line in train.values()],
        "accuracy": evaluated[rounds].get("accuracy") if rounds in evaluated else None,
    }
    Path(str(config["output"])).write_text(json.dumps(found))
