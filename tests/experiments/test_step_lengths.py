"""Methods compared at equal paths of the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.step_lengths import accuracy_at, final_accuracy, lead_at_equal_path, steps_table
from steps import StreamLength

from fedkeep.config.experiment import resolve
from fedkeep.core.seeds import generator
from fedkeep.core.types import Report
from fedkeep.sim.engine import Simulator


def run(method: str, multiple: float, accuracy: list[float], path: list[float]) -> dict[str, Any]:
    return {
        "task": "ic",
        "method": method,
        "multiple": multiple,
        "seed": 7,
        "rounds": [1, 2],
        "accuracy": accuracy,
        "path": path,
    }


SHORT = run("fifo", 1.0, [0.2, 0.4], [1.0, 2.0])
LONG = run("fifo", 2.0, [0.3, 0.5], [2.0, 4.0])
OTHER = run("ode-est", 1.0, [0.3, 0.6], [1.5, 3.0])


def test_accuracy_is_interpolated_along_the_path() -> None:
    assert accuracy_at(LONG, 3.0) == pytest.approx(40.0)
    assert accuracy_at(SHORT, 3.0) is None
    assert final_accuracy(run("fifo", 1.0, [0.0, *[0.5] * 5], [1.0] * 6)) == pytest.approx(50.0)


def test_a_lead_at_equal_path_takes_the_smallest_rate_that_gets_as_far() -> None:
    assert lead_at_equal_path(OTHER, [LONG, SHORT]) == pytest.approx(20.0)
    assert lead_at_equal_path(OTHER, [SHORT]) is None
    assert lead_at_equal_path(run("ode-est", 1.0, [0.6], [1.5]), [LONG, SHORT]) == pytest.approx(30)


def test_the_table_says_how_far_a_method_travels(tmp_path: Path) -> None:
    assert "ic: not run yet" in steps_table(tmp_path, tmp_path)
    (tmp_path / "steps.json").write_text(json.dumps({"runs": [SHORT, LONG, OTHER]}))
    rows = steps_table(tmp_path, tmp_path).splitlines()
    (ode,) = (row for row in rows if "Eq. 8" in row)
    assert ode.split(" | ")[1:] == ["+15.0", "not run", "1.50", "+20.0 |"]


def test_updates_keep_their_direction_and_take_the_length_of_their_streams() -> None:
    """Two participants by hand: the mean of two rescaled updates, weighted as reported."""
    simulator = Simulator(
        resolve({"task": {"name": "demo", "devices": 2}, "policy": {"name": "fifo"}})
    )
    before, learner = simulator.server.model, simulator.parts.learner
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(2, len(before)))
    reports = {
        d: Report(0, (before + update).astype(np.float32), weight, 3, 4, None)
        for d, (update, weight) in enumerate(zip(updates, (1.0, 3.0), strict=True))
    }
    moved = StreamLength(simulator).step(before, before, reports, 0.1)
    expected = before.astype(np.float64)
    for device, (update, share) in enumerate(zip(updates, (0.25, 0.75), strict=True)):
        own = simulator.parts.data.train.of(device)
        few = np.sort(generator(device, "stream-length").choice(own, 50, replace=False))
        batch = simulator.parts.data.take(few)
        gradient = learner.probe(before).measure(batch).mean_gradient()
        length = 0.1 * 3 * np.linalg.norm(gradient)
        expected += share * length * update / np.linalg.norm(update)
    np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6)
    assert StreamLength(simulator).step(before, before, {}, 0.1) is before


def test_arms_of_equal_length_are_compared_with_fifo_of_that_length(tmp_path: Path) -> None:
    scaled = [
        run("fifo-stream-length", 1.0, [0.1, 0.3], [0.5, 1.0]),
        run("ode-est-stream-length", 1.0, [0.2, 0.5], [0.5, 1.0]),
    ]
    (tmp_path / "steps.json").write_text(json.dumps({"runs": [SHORT, OTHER, *scaled]}))
    rows = steps_table(tmp_path, tmp_path).splitlines()
    (ode,) = (row for row in rows if "Eq. 8" in row and "stream's length" in row)
    assert ode.split(" | ")[1:] == ["+15.0", "0.50", "+30.0 |"]


def test_each_task_has_a_table_of_its_own(tmp_path: Path) -> None:
    other = [{**found, "task": "har-balanced", "accuracy": [0.1, 0.9]} for found in (SHORT, OTHER)]
    shorter = {**OTHER, "rounds": [0, 1], "accuracy": [0.9, 0.9]}
    (tmp_path / "steps.json").write_text(json.dumps({"runs": [SHORT, OTHER, shorter, *other]}))
    words = steps_table(tmp_path, tmp_path)
    first, second = words.split("Task `har-balanced`")
    assert "+15.0" in first
    assert "+0.0" in second
    assert "seeds 7, 2 rounds:" in second
