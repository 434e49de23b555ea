"""The server: fedkeep's strategy for the fleet that the run config specifies; it has no data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedkeep.flower.server_app import fleet_of, open_fleet

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Plays the run's rounds and says how good the model became."""
    strategy = open_fleet(context.run_config)
    measured = ""
    for outcome in strategy.rounds(grid, fleet_of(context.run_config).train.rounds):
        refused = [f"{r.device}: {r.reason}" for r in outcome.refusals]
        print(f"round {outcome.summary.round}: {outcome.metrics()} {refused or ''}", flush=True)
        measured = f", accuracy {outcome.evaluation['accuracy']:.4f}" if outcome.evaluation else measured
    print(f"done: {strategy.server.round} rounds{measured}", flush=True)
    if output := str(context.run_config["output"]):
        np.save(Path(output), strategy.server.model)
