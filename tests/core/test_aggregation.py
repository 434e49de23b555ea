"""Every rule: hand numbers, what holds for all of them, and what each survives."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attack_models import (
    AttackContext,
    alie,
    any_direction,
    as_long_as_honest,
    inner_product,
    min_max,
    scaled,
)
from fedkeep.config.components import COMPONENTS
from fedkeep.core.aggregation import (
    AGGREGATORS,
    Aggregator,
    FedAvg,
    FedNova,
    Median,
    NormBounded,
    RobustMean,
    Trimmed,
    UpdateSum,
)
from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.errors import ConfigError
from fedkeep.core.types import DeviceId, FloatArray, Report, Vector

START: Vector = np.array([1.0, 1.0], dtype=np.float32)
every_rule = pytest.mark.parametrize("rule", [cls() for cls in AGGREGATORS.values()], ids=str)


def report(x: float, y: float, weight: float = 1.0, steps: int = 1) -> Report:
    return Report(0, np.array([x, y], dtype=np.float32), weight, steps, 1, None)


def test_the_rules_are_known_by_these_names() -> None:
    names = {"fedavg", "fednova", "trimmed", "median", "norm-bounded", "robust"}
    assert names == set(AGGREGATORS) == set(COMPONENTS["aggregation"])
    assert {cls.label() for cls in AGGREGATORS.values()} == names


def test_fedavg_is_the_weighted_mean() -> None:
    merged = FedAvg().aggregate(START, [report(2, 0, weight=3), report(6, 4, weight=1)])
    np.testing.assert_allclose(merged, [3, 1])


def test_fednova_takes_the_number_of_steps_out() -> None:
    # Updates (2, 0) in 2 steps and (4, 0) in 4: both 1 a step; 3 steps on average.
    merged = FedNova().aggregate(START, [report(3, 1, steps=2), report(5, 1, steps=4)])
    np.testing.assert_allclose(merged, [4, 1])


def test_trimmed_drops_the_extremes_of_each_coordinate() -> None:
    reports = [report(1, 1), report(2, 2), report(3, 3), report(1e6, -1e6)]
    merged = Trimmed(trim=0.25).aggregate(START, reports)
    np.testing.assert_allclose(merged, [2.5, 1.5])


def test_trimmed_drops_extremes_also_where_few_report() -> None:
    """Rounded down, a tenth of three reports would be none: a robust mean in name only."""
    merged = Trimmed().aggregate(START, [report(1, 1), report(2, 2), report(1e6, -1e6)])
    np.testing.assert_allclose(merged, [2, 1])


def test_trimmed_weighs_what_it_keeps() -> None:
    reports = [report(0, 0), report(2, 2, weight=3), report(4, 4), report(9, 9)]
    np.testing.assert_allclose(Trimmed(trim=0.25).aggregate(START, reports), [2.5, 2.5])


def test_the_median_is_of_each_coordinate_whatever_the_weights() -> None:
    reports = [report(1, 9, weight=50), report(2, 2), report(1e6, -1e6)]
    np.testing.assert_allclose(Median().aggregate(START, reports), [2, 2])
    np.testing.assert_allclose(Median().aggregate(START, reports[:2]), [1.5, 5.5])


def test_norm_bounded_clips_updates_beyond_the_median() -> None:
    reports = [report(2, 1), report(2, 1), report(1001, 1)]
    merged = NormBounded().aggregate(START, reports)
    np.testing.assert_allclose(merged, [2, 1], rtol=1e-6)


def test_robust_clips_to_the_median_and_keeps_the_length_of_the_step() -> None:
    # Lengths 1, 1, 6: clipped to 1, together as long as 1, 1 and 2 would be.
    reports = [report(2, 1), report(2, 1), report(7, 1)]
    merged = RobustMean().aggregate(START, reports)
    np.testing.assert_allclose(merged, [1 + 4 / 3, 1], rtol=1e-6)


@pytest.mark.parametrize("trim", [-0.1, 0.5, float("nan")])
def test_wrong_options_are_named(trim: float) -> None:
    with pytest.raises(ValueError, match=r"trim must be at least 0 and below 0\.5"):
        Trimmed(trim=trim)


@every_rule
def test_without_weight_the_model_stays(rule: Aggregator) -> None:
    np.testing.assert_array_equal(rule.aggregate(START, []), START)
    np.testing.assert_array_equal(rule.aggregate(START, [report(9, 9, weight=0)]), START)


@every_rule
def test_reports_without_weight_change_nothing(rule: Aggregator) -> None:
    counted = [report(9, 9), report(9, 7)]
    without = rule.aggregate(START, counted)
    np.testing.assert_array_equal(
        rule.aggregate(START, [*counted, report(0, 7, weight=0)]), without
    )


@every_rule
def test_one_report_is_the_new_model(rule: Aggregator) -> None:
    np.testing.assert_allclose(rule.aggregate(START, [report(5, -3, weight=2, steps=7)]), [5, -3])


@every_rule
def test_equal_updates_are_taken_as_they_are(rule: Aggregator) -> None:
    reports = [report(4, -3, weight=weight, steps=3) for weight in (1, 2, 5)]
    np.testing.assert_allclose(rule.aggregate(START, reports), [4, -3], rtol=1e-6)


numbers = st.floats(-1e4, 1e4, width=32)
rows = st.lists(
    st.tuples(numbers, numbers, st.floats(0, 1e4), st.integers(0, 50)), min_size=1, max_size=9
)


@every_rule
@settings(deadline=None, max_examples=60)
@given(rows=rows, seed=st.integers(0, 5))
def test_the_order_of_reports_does_not_matter_and_the_model_stays_finite(
    rule: Aggregator, rows: list[tuple[float, float, float, int]], seed: int
) -> None:
    reports = [report(*row) for row in rows]
    if isinstance(
        rule, Trimmed
    ):  # which of equal values goes, with its weight, is left to the order
        reports = [replace(r, weight=1.0) for r in reports]
    merged = rule.aggregate(START, reports)
    shuffled = [reports[i] for i in np.random.default_rng(seed).permutation(len(reports))]
    assert merged.dtype == np.float32
    assert np.isfinite(merged).all()
    largest = float(np.abs([r.model for r in reports]).max())
    np.testing.assert_allclose(rule.aggregate(START, shuffled), merged, atol=1e-3 * (1 + largest))


@every_rule
@settings(deadline=None, max_examples=60)
@given(rows=rows)
def test_the_step_is_no_longer_than_twice_the_longest_update(
    rule: Aggregator, rows: list[tuple[float, float, float, int]]
) -> None:
    reports = [report(x, y, weight, max(steps, 1)) for x, y, weight, steps in rows]
    if isinstance(rule, FedNova):  # a slow device's update counts for more steps than it took
        reports = [replace(r, steps=3) for r in reports]
    longest = max(float(np.linalg.norm(r.model - START)) for r in reports)
    step = float(np.linalg.norm(rule.aggregate(START, reports) - START))
    assert step <= 2.01 * longest + 1e-3


@every_rule
def test_a_rule_works_on_sums_as_on_single_reports_or_declares_that_it_cannot(
    rule: Aggregator,
) -> None:
    reports = [report(3, 1, weight=2, steps=2), report(5, 2, weight=1, steps=4)]
    per_step = [r.steps if rule.per_step else 1 for r in reports]
    total = UpdateSum(
        np.sum(
            [r.weight * (r.model - START) / s for r, s in zip(reports, per_step, strict=True)], 0
        ),
        weight=sum(r.weight for r in reports),
        steps=sum(r.weight * r.steps for r in reports),
    )
    if rule.works_on_sums():
        np.testing.assert_allclose(rule.apply(START, total), rule.aggregate(START, reports))
    else:
        with pytest.raises(ConfigError, match="must see single reports"):
            rule.apply(START, total)


def test_a_custom_rule_does_not_inherit_the_sums_of_another() -> None:
    class Halved(FedAvg):
        def aggregate(self, model: Vector, reports: object) -> Vector:
            return np.float32(0.5) * model

    assert FedAvg.works_on_sums()
    assert FedNova.works_on_sums()
    assert not Halved.works_on_sums()
    assert Halved.label() == "Halved"


# What each survives: nine honest devices and two Byzantine ones, of one mind.

SIZE, HONEST, BYZANTINE = 40, 9, 2
MODEL: Vector = np.zeros(SIZE, dtype=np.float32)
WAY = np.ones(SIZE) / np.sqrt(SIZE)
Attack = Callable[[AttackContext], Mapping[DeviceId, Report]]
ATTACKS: dict[str, Attack] = {
    "sign flipped": scaled(-1.0),
    "sign flipped, x10": scaled(-10.0),
    "any direction, length 999": any_direction(999.0),
    "inner product": as_long_as_honest(inner_product(1.0)),
    "inner product, x10": inner_product(10.0),
    "a little is enough": alie(1.5),
    "min-max": min_max,
}
"""Of benchmarks/attacks.py."""
UNBOUNDED = {"sign flipped, x10", "any direction, length 999", "inner product, x10"}
"""What a plain mean follows as far as it is pushed."""
BOUNDED_RULES: list[Aggregator] = [Trimmed(trim=0.2), Median(), NormBounded(), RobustMean()]
"""All that claim robustness."""


def honest_reports(round_: int) -> dict[DeviceId, Report]:
    """Updates of length near 1 that share a third of their way, as in the tasks."""
    rng = np.random.default_rng(round_)
    updates = 0.4 * WAY + rng.standard_normal((HONEST + BYZANTINE, SIZE)) / np.sqrt(SIZE)
    return {
        device: Report(round_, update.astype(np.float32), 1.0, 1, 1, None)
        for device, update in enumerate(updates)
    }


def late_steps(rule: Aggregator, attack: Attack | None, rounds: int = 20) -> FloatArray:
    """The mean step of the model over the last rounds."""
    statistics, steps = UpdateStatistics(), []
    for round_ in range(rounds):
        reports = honest_reports(round_)
        honest = {d: r for d, r in reports.items() if d < HONEST}
        own = {d: r for d, r in reports.items() if d >= HONEST}
        sent = (
            honest if attack is None else attack(AttackContext(round_, rounds, MODEL, honest, own))
        )
        merged = rule.merge(MODEL, dict(sorted({**honest, **sent}.items())), statistics)
        steps.append(merged.model.astype(np.float64))
    return np.asarray(np.mean(steps[rounds // 2 :], axis=0))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", BOUNDED_RULES, ids=str)
def test_a_minority_moves_a_robust_rule_less_than_the_honest_do(
    rule: Aggregator, attack: str
) -> None:
    clean, attacked = late_steps(rule, None), late_steps(rule, ATTACKS[attack])
    assert np.linalg.norm(attacked - clean) < 0.8 * np.linalg.norm(clean)
    assert attacked @ WAY > 0.2 * (clean @ WAY)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_robust_mean_learns_as_without_an_attack(attack: str) -> None:
    clean, attacked = late_steps(RobustMean(), None), late_steps(RobustMean(), ATTACKS[attack])
    assert attacked @ WAY > 0.95 * (clean @ WAY)


@pytest.mark.parametrize("attack", sorted(UNBOUNDED))
@pytest.mark.parametrize("rule", [FedAvg(), FedNova()], ids=str)
def test_plain_means_are_lost_to_one_of_five(rule: Aggregator, attack: str) -> None:
    clean, attacked = late_steps(rule, None), late_steps(rule, ATTACKS[attack])
    assert np.linalg.norm(attacked - clean) > 1.5 * np.linalg.norm(clean)
