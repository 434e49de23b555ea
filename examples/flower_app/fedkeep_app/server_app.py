"""The server: fedkeep's strategy for the fleet that the run config specifies; it has no data."""

from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedkeep.flower.server_app import play

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Plays the run's rounds, and saves the model if `output` says where."""
    model = play(grid, context.run_config)
    if output := str(context.run_config["output"]):
        np.save(Path(output), model)
