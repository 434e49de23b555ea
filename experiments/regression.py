"""Plays regression.toml, and sums it up in results/regression.json.

    FEDKEEP_DATA=... python experiments/regression.py [--runs runs/regression] [--jobs 1]

Task, model, rate, store and rounds are those of tasks/c-mapss-life-ordered.toml, fixed before any
method ran; its rate is that of the same engines as classes. The table of docs/regression.md is
written from the JSON file by docs/generate_regression.py.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fedkeep.config.experiment import expand, read_experiment
from fedkeep.records import Run, compare, read_runs
from fedkeep.records.measures import mean_accuracy
from fedkeep.sim.sweep import run_sweep

HERE = Path(__file__).parent
OUT = HERE / "results" / "regression.json"


def of_run(run: Run) -> dict[str, float | int | str | None]:
    """One run in the numbers of the table."""
    last = run.evaluations[-1]
    return {
        "seed": run.header.seed,
        "config_hash": run.header.config_hash,
        "r2": last.accuracy,
        "mean_r2": mean_accuracy(run.evaluations),
        "rmse": last.rmse,
        "mae": last.mae,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/regression"))
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    asked.runs.mkdir(parents=True, exist_ok=True)
    cells = expand(read_experiment(HERE / "regression.toml"))
    run_sweep(cells, asked.runs, jobs=asked.jobs, resume=True, listen=lambda *_: None)
    runs = [run for run in read_runs(asked.runs) if run.end is not None]
    methods: dict[str, list[dict[str, Any]]] = {
        row.method: [] for row in compare(runs, ["fifo"]).rows
    }
    for run in runs:
        methods[run.header.method].append(of_run(run))
    for found in methods.values():
        found.sort(key=lambda own: own["seed"])
    OUT.write_text(
        json.dumps({"rounds": runs[0].header.rounds, "methods": methods}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
