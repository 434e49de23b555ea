"""The table of docs/regression.md is that of the committed results."""

import json
import subprocess
import sys
from pathlib import Path

from fedkeep.config.experiment import expand, read_experiment

ROOT = Path(__file__).parents[2]


def test_the_table_is_generated_from_the_results() -> None:
    command = [sys.executable, "docs/generate_regression.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_results_are_of_the_experiment_as_it_stands() -> None:
    found = json.loads((ROOT / "experiments" / "results" / "regression.json").read_text())
    cells = expand(read_experiment(ROOT / "experiments" / "regression.toml"))
    wanted = {
        (cell.experiment.label, cell.experiment.seed): cell.experiment.digest() for cell in cells
    }
    hashes = {
        (method, run["seed"]): run["config_hash"]
        for method, runs in found["methods"].items()
        for run in runs
    }
    assert hashes == wanted
