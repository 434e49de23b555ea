"""Methods compared at equal paths of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from lab.step_lengths import accuracy_at, final_accuracy, lead_at_equal_path, steps_table


def run(method: str, multiple: float, accuracy: list[float], path: list[float]) -> dict[str, Any]:
    return {
        "method": method,
        "multiple": multiple,
        "seed": 7,
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
    assert "Not run" in steps_table(tmp_path, tmp_path)
    (tmp_path / "steps.json").write_text(json.dumps({"runs": [SHORT, LONG, OTHER]}))
    rows = steps_table(tmp_path, tmp_path).splitlines()
    (ode,) = (row for row in rows if "Eq. 8" in row)
    assert ode.split(" | ")[1:] == ["+15.0", "not run", "1.50", "+20.0 |"]
