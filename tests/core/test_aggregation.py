"""Eq. 2 and its relatives on hand numbers."""

import numpy as np
import pytest

from fedkeep.core.aggregation import Aggregation
from fedkeep.core.types import Report, Vector

START: Vector = np.array([1.0, 1.0], dtype=np.float32)


def report(x: float, y: float, weight: float = 1.0, steps: int = 1) -> Report:
    return Report(0, np.array([x, y], dtype=np.float32), weight, steps, 1, None)


def test_fedavg_is_the_weighted_mean() -> None:
    merged = Aggregation().aggregate(START, [report(2, 0, weight=3), report(6, 4, weight=1)])
    np.testing.assert_allclose(merged, [3, 1])


def test_fednova_takes_the_number_of_steps_out() -> None:
    # Updates (2, 0) in 2 steps and (4, 0) in 4: both 1 a step; 3 steps on average.
    merged = Aggregation("fednova").aggregate(START, [report(3, 1, steps=2), report(5, 1, steps=4)])
    np.testing.assert_allclose(merged, [4, 1])


def test_trimmed_drops_the_extremes_of_each_coordinate() -> None:
    reports = [report(1, 1), report(2, 2), report(3, 3), report(1e6, -1e6)]
    merged = Aggregation("trimmed", trim=0.25).aggregate(START, reports)
    np.testing.assert_allclose(merged, [2.5, 1.5])


def test_trimmed_drops_extremes_also_where_few_report() -> None:
    """Rounded down, a tenth of three reports would be none: a robust mean in name only."""
    merged = Aggregation("trimmed").aggregate(
        START, [report(1, 1), report(2, 2), report(1e6, -1e6)]
    )
    np.testing.assert_allclose(merged, [2, 1])


def test_norm_bounded_shortens_updates_beyond_the_median() -> None:
    reports = [report(2, 1), report(2, 1), report(1001, 1)]
    merged = Aggregation("norm-bounded").aggregate(START, reports)
    np.testing.assert_allclose(merged, [2, 1], rtol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fednova", "trimmed", "norm-bounded"])
def test_without_weight_the_model_stays(name: str) -> None:
    rule = Aggregation(name)  # type: ignore[arg-type]
    np.testing.assert_array_equal(rule.aggregate(START, []), START)
    np.testing.assert_array_equal(rule.aggregate(START, [report(9, 9, weight=0)]), START)
    np.testing.assert_allclose(
        rule.aggregate(START, [report(9, 9), report(9, 9), report(7, 7, weight=0)]), [9, 9]
    )


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"trim must be .* got 0\.5"):
        Aggregation("trimmed", trim=0.5)
