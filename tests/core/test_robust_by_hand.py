"""The stages of the robust mean on updates of two numbers, computed by hand."""

import math

import numpy as np
import pytest

from fedkeep.core.aggregation import RobustMean
from fedkeep.core.aggregation.base import UpdateSum
from fedkeep.core.aggregation.fedavg import FedAvg
from fedkeep.core.aggregation.fednova import FedNova
from fedkeep.core.aggregation.norm_bounded import NormBounded
from fedkeep.core.aggregation.pipeline import UpdatePipeline
from fedkeep.core.aggregation.robust.clip import ClippedReports
from fedkeep.core.aggregation.robust.filter import ReferenceDirections, filter_updates
from fedkeep.core.aggregation.robust.reputation import reputation_weights
from fedkeep.core.aggregation.robust.statistics import Agreement, UpdateStatistics
from fedkeep.core.aggregation.robust.validate import inconsistent_gradients
from fedkeep.core.aggregation.rows import UpdateRows
from fedkeep.core.errors import RejectionReason
from fedkeep.core.screening import Limits
from fedkeep.core.types import BoolArray, DeviceId, FloatArray, Report, Vector

MODEL: Vector = np.zeros(2, dtype=np.float32)
RIGHT = (1.0, 0.0)


def report(
    update: tuple[float, float],
    gradient: tuple[float, float] | None = None,
    weight: float = 1.0,
    steps: int = 1,
) -> Report:
    sent = None if gradient is None else np.array(gradient, dtype=np.float32)
    return Report(
        0, np.array(update, dtype=np.float32), weight, steps, 1, sent, int(sent is not None)
    )


def fleet(*updates: tuple[float, float]) -> dict[DeviceId, Report]:
    return {device: report(update) for device, update in enumerate(updates)}


def array(*rows: tuple[float, float]) -> FloatArray:
    return np.array(rows, dtype=np.float64)


def updates_of(*rows: tuple[float, float]) -> UpdateRows:
    matrix = array(*rows)
    return UpdateRows(len(rows), 2, lambda own, part, out: np.copyto(out, matrix[own, part]))


def content(updates: UpdateRows) -> FloatArray:
    return np.concatenate([block.copy() for _, block in updates.column_blocks()], axis=1)


# Lengths


def test_twice_the_usual_length_is_clipped_and_twenty_times_is_the_last_that_counts() -> None:
    statistics = UpdateStatistics()
    statistics.learn_lengths([1.0] * 10)
    reports = fleet((2.0, 0.0), (3.0, 0.0), (20.0, 0.0), (21.0, 0.0))
    clipped = ClippedReports(MODEL, reports, statistics, ratio=2.0)
    assert {d: r.model.tolist() for d, r in clipped.reports.items()} == {
        0: [2.0, 0.0],
        1: [2.0, 0.0],
        2: [2.0, 0.0],
    }
    assert [(device, reason) for device, reason, _ in clipped.findings] == [
        (1, RejectionReason.UPDATE_CUT),
        (2, RejectionReason.UPDATE_CUT),
        (3, RejectionReason.LARGE_UPDATE),
    ]
    assert clipped.lengths == [2.0, 3.0, 20.0, 21.0]


def test_fifty_lengths_are_remembered() -> None:
    statistics = UpdateStatistics()
    statistics.learn_lengths([1.0] * 26)
    statistics.learn_lengths([2.0] * 25)
    assert statistics.usual_length() == 1.5


def test_the_longest_usual_length_is_known_from_the_fifth_on() -> None:
    statistics = UpdateStatistics()
    statistics.learn_lengths([1.0] * 5)
    statistics.learn_lengths([0.01] * 50)
    assert statistics.max_length([], 10.0) == pytest.approx(9.9)


def test_weights_and_steps_of_earlier_rounds_are_remembered() -> None:
    statistics = UpdateStatistics()
    statistics.learn_weights([1.0, 2.0])
    assert statistics.learn_weights([3.0]).tolist() == [1.0, 2.0, 3.0]
    statistics.learn_reference(np.array([1.0, 0.0]))
    statistics.learn_reference(np.array([0.0, 1.0]))
    assert statistics.reference == pytest.approx(np.array([0.8, 0.2]))


def test_statistics_survive_a_restart() -> None:
    statistics, restored = UpdateStatistics(), UpdateStatistics()
    statistics.learn_lengths([1.0, 2.0])
    statistics.learn_weights([3.0])
    statistics.learn_reference(np.array([1.0, 0.0]))
    statistics.agreement = {4: Agreement(0.1, 0.2), 7: Agreement(-0.3, 0.6)}
    restored.restore(statistics.snapshot())
    assert restored.agreement == {4: (0.1, 0.2), 7: (-0.3, 0.6)}
    assert restored.agreement[7].mean == pytest.approx(-0.5)
    assert restored.median_length([]) == 1.5
    assert restored.learn_weights([]).tolist() == [3.0]
    assert restored.reference is not None
    assert restored.reference.tolist() == [1.0, 0.0]


# Directions


def directions(
    updates: UpdateRows, trusted: BoolArray, earlier: FloatArray | None = None
) -> FloatArray:
    found = ReferenceDirections(updates, trusted, earlier)
    return found.of(np.arange(len(trusted)), slice(0, 2), content(updates))


def test_the_direction_of_the_others_is_a_mean_of_the_trusted_and_of_earlier_rounds() -> None:
    updates, trusted = updates_of((1, 0), (0, 1), (1, 1)), np.array([True, True, False])
    found = directions(updates, np.ones(3, dtype=bool))
    assert found[0] == pytest.approx(np.array([1, 2]) / math.sqrt(5))
    found = directions(updates, trusted, np.array([1.0, 0.0]))
    assert found[0] == pytest.approx(np.array([0.8, 0.2]) / math.hypot(0.8, 0.2))
    assert found[2] == pytest.approx(np.array([0.9, 0.1]) / math.hypot(0.9, 0.1))


def test_agreement_is_the_cosine_with_the_others_whatever_the_length() -> None:
    statistics = UpdateStatistics()
    filter_updates([0, 1, 2], updates_of((3, 0), (3, 0), (3, 4)), statistics)
    assert statistics.agreement[0].mean == pytest.approx(3 / math.sqrt(13))
    assert statistics.agreement[2].mean == pytest.approx(3 / 5)
    assert statistics.agreement[2].mass == pytest.approx(0.2)
    filter_updates([2, 0, 1], updates_of((0, 4), (3, 0), (3, 0)), statistics)
    assert statistics.agreement[2] == pytest.approx((0.8 * 0.2 * 0.6, 0.36))


def test_an_update_that_agrees_with_nobody_but_contradicts_nobody_is_trusted() -> None:
    statistics = UpdateStatistics()
    found = filter_updates(range(6), updates_of(*[RIGHT] * 5, (0, 1)), statistics)
    assert not found.projected.any()
    assert statistics.agreement[0].mean == pytest.approx(4 / math.sqrt(17))


def test_what_conflicts_is_projected_out_and_its_sender_filtered() -> None:
    statistics = UpdateStatistics()
    found = filter_updates(range(6), updates_of(*[RIGHT] * 5, (-1, 1)), statistics)
    assert found.projected.tolist() == [False] * 5 + [True]
    assert found.filtered.tolist() == [False] * 5 + [True]
    assert content(found.updates) == pytest.approx(array(*[RIGHT] * 5, (0, 1)))


# The robust mean


def test_the_step_is_as_long_as_the_updates_were() -> None:
    statistics = UpdateStatistics()
    updates = [(0.1, 0.0)] * 4 + [(0.4, 0.0)]
    merged = RobustMean().merge(MODEL, fleet(*updates), statistics)
    # The long one is clipped to 0.1, and counts towards the length with 0.2.
    assert merged.filtered == ()
    assert [merged.model_of(d)[0] for d in merged.reports] == pytest.approx([0.12] * 5)
    assert statistics.reference == pytest.approx(np.array([0.12, 0.0]))


def test_a_round_of_nobody_but_devices_far_out_filters_none() -> None:
    statistics = UpdateStatistics()
    statistics.reference = np.array([1.0, 0.0])
    statistics.agreement = {device: Agreement(0.9, 1.0) for device in range(10, 20)}
    merged = RobustMean().merge(MODEL, fleet(*[(-1.0, 0.0)] * 3), statistics)
    assert merged.filtered == ()
    assert statistics.reference.tolist() == [1.0, 0.0]


def test_a_newcomer_counts_by_its_reports_and_one_that_hardly_agrees_by_the_square() -> None:
    statistics = UpdateStatistics()
    known = 1 - 0.8**5
    statistics.agreement = {device: Agreement(0.9 * known, known) for device in range(4)}
    statistics.agreement[4] = Agreement(0.9 * 0.2, 0.2)
    weights = reputation_weights([0, 4], statistics)
    assert weights == pytest.approx([1.0, 0.2 / 0.67232])
    statistics.agreement[4] = Agreement(0.1, 1.0)
    # The median is 0.9, and 2.5 times the least deviation of 0.05 below it is 0.775.
    assert reputation_weights([4], statistics) == pytest.approx([(0.1 / 0.775) ** 2])
    del statistics.agreement[3]
    assert reputation_weights([4], statistics).tolist() == [1.0]  # four are too few to compare


# Local gradients


def test_a_gradient_that_its_own_update_climbs_does_not_count() -> None:
    reports = [report((1.0, 0.0), (-1.0, 0.0))] * 5 + [report((1.0, 0.0), (1.0, 0.0))]
    updates = UpdateRows.of(MODEL, reports)
    assert inconsistent_gradients(reports, updates).tolist() == [False] * 5 + [True]
    without = [report((1.0, 0.0))] * 3
    assert not inconsistent_gradients(without, UpdateRows.of(MODEL, without)).any()


@pytest.mark.parametrize("length", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(("cosine", "contradicts"), [(-0.1, False), (-0.5, True)])
def test_the_angle_decides_and_not_the_length(
    length: float, cosine: float, contradicts: bool
) -> None:
    # Four cosines of 0: two and a half times the least deviation allow down to -0.125.
    reports = [report((1.0, 0.0), (0.0, 1.0))] * 4
    gradient = length * np.array([-cosine, math.sqrt(1 - cosine**2)])
    reports.append(report((length, 0.0), (float(gradient[0]), float(gradient[1]))))
    updates = UpdateRows.of(MODEL, reports)
    assert inconsistent_gradients(reports, updates).tolist() == [False] * 4 + [contradicts]


@pytest.mark.parametrize("strict", [False, True])
def test_strict_gradients_count_only_where_they_agree_as_well_as_the_others(
    strict: bool,
) -> None:
    reports = {device: report(RIGHT, (-1.0, 0.01 * device)) for device in range(6)}
    reports[6] = report(RIGHT, (-0.3, 1.0))
    merged = RobustMean(strict_gradients=strict).merge(MODEL, reports, UpdateStatistics())
    without = [d for d, found in merged.reports.items() if found.local_gradient is None]
    assert without == ([6] if strict else [])


@pytest.mark.parametrize("strict", [False, True])
def test_strict_gradients_leave_out_whoever_hardly_agrees_with_the_fleet(
    strict: bool,
) -> None:
    reports = {device: report(RIGHT, (-1.0, 0.0)) for device in range(6)}
    reports[6] = report((0.2, 1.0), (-0.2, -1.0))
    merged = RobustMean(strict_gradients=strict).merge(MODEL, reports, UpdateStatistics())
    assert merged.reports[6].weight < 0.5
    assert (merged.reports[6].local_gradient is None) is strict


# The pipeline


def test_a_round_teaches_the_lengths_and_names_the_gradients_that_were_dropped() -> None:
    pipeline = UpdatePipeline(RobustMean(), Limits())
    reports = {device: report(RIGHT, (-1.0, 0.0)) for device in range(5)}
    reports |= {5: report(RIGHT, (1.0, 0.0)), 6: report(RIGHT)}
    assert pipeline.merge(MODEL, reports).dropped_gradients == [5]
    assert pipeline.snapshot()["usual.lengths"].tolist() == [1.0] * 7


@pytest.mark.parametrize(("ratio", "longest"), [(2.0, 2.0), (1.0, 1.0)])
def test_a_long_gradient_is_clipped_to_a_multiple_of_the_median(
    ratio: float, longest: float
) -> None:
    pipeline = UpdatePipeline(RobustMean(gradient_ratio=ratio), Limits())
    reports = {device: report(RIGHT, (-1.0, 0.0)) for device in range(5)}
    reports[5] = report(RIGHT, (-9.0, 0.0))
    clipped = pipeline.clip_gradients(reports, lambda _: 1.0)
    assert [float(np.linalg.norm(g)) for g, _ in clipped.values()] == [1.0] * 5 + [longest]


def test_a_plan_sets_the_most_that_a_gradient_counts() -> None:
    pipeline = UpdatePipeline(RobustMean(), Limits())
    reports = {0: report(RIGHT, (-1.0, 0.0))}
    assert pipeline.clip_gradients(reports, lambda _: 0.7)[0][1] == 0.7
    pipeline.follow_plan(dict.fromkeys(range(5), 0.25) | {5: 0.0})
    assert pipeline.clip_gradients(reports, lambda _: 0.7)[0][1] == 0.25
    assert pipeline.clip_gradients(reports, lambda _: 0.2)[0][1] == 0.2


def test_a_device_that_left_is_forgotten_by_every_stage() -> None:
    pipeline = UpdatePipeline(RobustMean(), Limits())
    reports = {device: report(RIGHT, (-1.0, 0.0)) for device in range(2)}
    pipeline.merge(MODEL, reports)
    pipeline.clip_gradients(reports, lambda _: 1.0)
    pipeline.forget(0)
    alone = UpdatePipeline(RobustMean(), Limits())
    alone.restore(pipeline.snapshot())
    assert list(alone.statistics.agreement) == [1]
    assert list(alone._gradients.norms) == [1]


# Rules without memory


def test_a_short_update_is_not_lengthened_and_a_long_one_is_clipped_to_the_median() -> None:
    reports = list(fleet((0.4, 0.0), (0.4, 0.0), (0.1, 0.0), (0.0, 0.8)).values())
    assert NormBounded().aggregate(MODEL, reports) == pytest.approx([0.225, 0.1])


@pytest.mark.parametrize("weight", [0.25, 4.0])
def test_a_sum_of_updates_moves_the_model_by_their_mean(weight: float) -> None:
    total = UpdateSum(weight * np.array([2.0, 1.0]), weight, 3 * weight)
    assert FedAvg().apply(MODEL, total).tolist() == [2.0, 1.0]
    assert FedNova().apply(MODEL, total).tolist() == [6.0, 3.0]
    nothing = UpdateSum(np.zeros(2), 0.0, 0.0)
    assert FedAvg().apply(MODEL, nothing) is MODEL
    assert FedNova().apply(MODEL, nothing) is MODEL


class SameMean(FedAvg):
    """Inherits the rule and its form for sums."""


class OtherMean(FedAvg):
    """Has another step, which the inherited form for sums does not know."""

    def aggregate(self, model: Vector, reports: list[Report]) -> Vector:  # type: ignore[override]
        return model


def test_a_rule_works_on_sums_where_the_class_that_defines_it_says_how() -> None:
    assert SameMean.works_on_sums()
    assert not OtherMean.works_on_sums()
    assert (FedNova.label(), OtherMean.label()) == ("fednova", "OtherMean")
