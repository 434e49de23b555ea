"""The server: fedkeep's strategy over this task, its state saved after every round if `state.url` says where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedkeep.flower.server_app import open_strategy
from fedkeep_app.task import accuracy, server_parts

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Plays the run's rounds and says how good the model became."""
    experiment, parts, sizes = server_parts(context.run_config)
    strategy = open_strategy(parts.server, sizes, context.run_config, participation=experiment.train.participation)
    for outcome in strategy.rounds(grid, experiment.train.rounds):
        refused = [f"{r.device}: {r.reason}" for r in outcome.refusals]
        print(f"round {outcome.summary.round}: {outcome.metrics()} {refused or ''}", flush=True)
    model = strategy.server.model
    print(f"done: {strategy.server.round} rounds, accuracy {accuracy(parts, model):.4f}", flush=True)
    if output := str(context.run_config["output"]):
        np.save(Path(output), model)
