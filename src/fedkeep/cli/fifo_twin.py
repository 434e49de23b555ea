"""FIFO beside a fleet of one's own machine: `python -m fedkeep.cli.fifo_twin FOLDER`.

The fleet's supervisor runs it where the folder has a `twin.toml`: an experiment, played by the
simulator as far as the fleet has come. Its record stands beside the fleet's, so that the page shows
what the same devices would have reached had they kept their newest samples.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedkeep.config.experiment import read_experiment, resolve
from fedkeep.core.errors import FedkeepError
from fedkeep.deploy.first_fleet import FirstFleet
from fedkeep.records import Evaluation, Header, Recorder
from fedkeep.records.runs import versions
from fedkeep.sim.engine import Simulator
from fedkeep.tables import Table, merged

_LOOK_SECONDS = 2.0
_LISTED = 50
"""No more devices stand in an evaluation one by one."""
_NICE = 10


def play(table: Table, record: Path, reached: Callable[[], int | None]) -> None:
    """Play an experiment as far as a fleet has come, and record each round's evaluation.

    Parameters
    ----------
    table : Table
        The experiment.
    record : Path
        Where the record goes; one that is there is written anew.
    reached : callable
        Returns the fleet's round, or None once the fleet has stopped.
    """
    experiment = resolve(table)
    simulator = Simulator(experiment)
    record.unlink(missing_ok=True)
    with Recorder(record) as recorder:
        recorder.start(
            Header(
                run="fifo", method="fifo, simulated", task="fleet", seed=experiment.seed,
                config=experiment.resolved(), config_hash=experiment.digest(),
                versions=versions(), labels=simulator.parts.data.label_names,
                devices=simulator.parts.data.devices, rounds=experiment.train.rounds,
            )
        )  # fmt: skip
        while (wanted := reached()) is not None:
            while simulator.server.round < wanted:
                scores = simulator.play_round(evaluated=True).evaluation
                assert scores is not None
                devices = tuple(map(float, scores.device_accuracy))
                recorder.write(
                    Evaluation(
                        round=simulator.server.round,
                        accuracy=scores.accuracy,
                        loss=scores.loss,
                        device_accuracy=devices if len(devices) <= _LISTED else (),
                    )
                )
            time.sleep(_LOOK_SECONDS)


def main(folder: Path) -> int:
    """Play the twin of the fleet in a folder, once its devices have declared their capacities."""
    os.nice(_NICE)
    fleet = FirstFleet(folder)
    while (capacity := fleet.capacity()) is None:
        time.sleep(_LOOK_SECONDS)
    ours = {"task": {"devices": len(fleet.devices())}, "storage": {"capacity": capacity}}
    try:
        table = merged(read_experiment(fleet.twin), ours)
        play(table, fleet.record.with_name("fifo.jsonl"), fleet.reached)
    except FedkeepError as error:
        print(f"fedkeep: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
