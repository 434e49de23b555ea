"""The rule of an advice: hand numbers, and panels with known truth."""

from collections.abc import Sequence

import numpy as np
import pytest

from fedkeep.advice.rule import LOOKS, MARGIN, lead, open_methods, recommend

CANDIDATES = ("fifo", "a", "b", "c", "d", "e")


def finals(table: dict[str, Sequence[float]]) -> dict[str, dict[int, float]]:
    return {method: dict(enumerate(values)) for method, values in table.items()}


def test_a_lead_has_the_bounds_of_the_rule() -> None:
    found = lead(finals({"a": [0.75, 0.77, 0.76], "fifo": [0.70] * 3}), "a", "fifo", candidates=5)
    assert found is not None
    # Mean 0.06, deviation 0.01; t with 2 degrees of freedom at a tail of 0.05 / 5 / 5 is 15.764.
    assert (found.mean, found.seeds) == (pytest.approx(0.06), 3)
    assert found.low == pytest.approx(0.06 - 15.764 * 0.01 / 3**0.5, abs=1e-5)
    assert found.high == pytest.approx(0.06 + 15.764 * 0.01 / 3**0.5, abs=1e-5)
    assert not found.is_better
    assert not found.is_settled


def test_seeds_between_two_looks_do_not_count() -> None:
    table = finals({"a": [0.8, 0.8, 0.8, 0.1], "fifo": [0.7] * 4})
    found = lead(table, "a", "fifo", candidates=1)
    assert found is not None
    assert (found.seeds, found.mean) == (3, pytest.approx(0.1))
    assert lead(finals({"a": [0.8, 0.8], "fifo": [0.7] * 4}), "a", "fifo", candidates=1) is None


def test_the_simplest_method_that_the_best_does_not_exceed_by_a_point_is_recommended() -> None:
    steady = [0.700, 0.701, 0.699, 0.700, 0.700]
    near = [value + 0.10 for value in steady]
    best = [value + 0.104 for value in steady]
    far = [value + 0.16 for value in steady]
    names = ("fifo", "near", "best", "far")
    two = finals({"fifo": steady, "near": near, "best": best})
    assert recommend(two, names[:3]) == "near"
    assert recommend(finals({"fifo": steady, "near": near, "best": best, "far": far}), names) == (
        "far"
    )
    assert recommend(finals({"fifo": steady}) | {"near": {}}, names[:2]) == "fifo"


def test_a_sure_lead_of_less_than_a_point_is_no_reason_for_another_method() -> None:
    steady = [0.700, 0.710, 0.720]
    table = finals({"fifo": steady, "a": [value + 0.009 for value in steady]})
    assert recommend(table, ("fifo", "a")) == "fifo"
    assert open_methods(table, ("fifo", "a")) == []
    table = finals({"fifo": steady, "a": [value + 0.011 for value in steady]})
    assert recommend(table, ("fifo", "a")) == "a"


def play(
    rng: np.random.Generator, leads: Sequence[float], deviation: float
) -> dict[str, dict[int, float]]:
    """One trial as `Trial` runs it: all methods at the first look, then what is open."""
    seeds = np.arange(LOOKS[-1])
    shared = rng.normal(0.75, 0.02, len(seeds))
    curves = {
        method: shared + lead + rng.normal(0, deviation, len(seeds))
        for method, lead in zip(CANDIDATES, (0.0, *leads), strict=True)
    }
    found: dict[str, dict[int, float]] = {method: {} for method in CANDIDATES}
    going: Sequence[str] = CANDIDATES
    for look in LOOKS:
        for method in going:
            found[method] |= {seed: float(curves[method][seed]) for seed in range(look)}
        open_ = open_methods(found, CANDIDATES)
        if not open_:
            break
        going = list(dict.fromkeys(("fifo", recommend(found, CANDIDATES), *open_)))
    return found


@pytest.mark.parametrize("deviation", [0.005, 0.01, 0.03])
@pytest.mark.parametrize("leads", [(0.0,) * 5, (MARGIN,) * 5, (-0.02, 0.0, 0.005, 0.01, 0.01)])
def test_false_recommendations_are_rarer_than_five_percent(
    leads: Sequence[float], deviation: float
) -> None:
    rng = np.random.default_rng(0)
    panels = 120
    wrong = sum(recommend(play(rng, leads, deviation), CANDIDATES) != "fifo" for _ in range(panels))
    assert wrong <= 0.05 * panels


@pytest.mark.parametrize(("lead_", "deviation"), [(0.05, 0.01), (0.167, 0.05)])
def test_clear_leads_are_found(lead_: float, deviation: float) -> None:
    rng = np.random.default_rng(1)
    found = [
        recommend(play(rng, (0.0, 0.0, lead_, 0.0, 0.0), deviation), CANDIDATES) for _ in range(100)
    ]
    assert found.count("c") >= 95
