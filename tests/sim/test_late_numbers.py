"""Numbers to predict that come later than their samples, in a simulation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.config.experiment import resolve
from fedkeep.core.errors import ConfigError
from fedkeep.sim.engine import Simulator


def simulated(folder: Path, width: int = 1, **tables: Any) -> Simulator:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((240, 3)).astype(np.float32)
    y = (x @ np.ones((3, width))).squeeze()
    path = folder / "meter.npz"
    np.savez(path, x=x, y=y, device=np.repeat(np.arange(4), 60))
    table: dict[str, Any] = {
        "task": {"name": "custom", "path": str(path), "target": "number", "rounds_per_pass": 20},
        "model": {"name": "linear"},
        "storage": {"capacity": 8},
        "train": {"rounds": 20, "participation": 1.0, "learning_rate": 0.1},
        "policy": {"name": "balanced-reservoir"},
        "waiting": {"share": 0.5},
    }
    return Simulator(resolve(table | tables))


def test_late_numbers_are_learned_once_they_come(tmp_path: Path) -> None:
    late = simulated(tmp_path, stream={"label_delay": 3})
    never = simulated(tmp_path, stream={"label_delay": 50})
    scores = {}
    for name, one in {"late": late, "never": never}.items():
        for _ in one.run():
            pass
        numbers = one.evaluate().numbers
        assert numbers is not None
        scores[name] = numbers.r2
    assert scores["late"] > 0.9
    assert scores["never"] < 0.5


def test_what_is_for_one_number_or_for_labels_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one number a sample"):
        simulated(tmp_path, width=2, stream={"labelled": 0.3})
    with pytest.raises(ConfigError, match="pseudo_labels' is about labels"):
        simulated(tmp_path, waiting={"share": 0.5, "pseudo_labels": 0.9})
