"""Updates of large models: the same numbers in parts as whole, and little memory."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from fedkeep.core.aggregation import (
    AGGREGATORS,
    Aggregator,
    FedAvg,
    MergedReports,
    RobustMean,
    rows,
)
from fedkeep.core.aggregation.base import RoundUpdates
from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.types import FloatArray, Report, Vector

PARAMETERS, DEVICES = 200, 9
LAST = 130
"""Parameters of the last layer, which alone local gradients are of."""
Played = tuple[MergedReports, UpdateStatistics]


def reports(round_: int, parameters: int = PARAMETERS) -> dict[int, Report]:
    """A fleet of which one climbs and one is far too long, so that every stage has work."""
    draw = np.random.default_rng(round_)
    way = draw.standard_normal(parameters)
    found = {}
    for device in range(DEVICES):
        update = 0.5 * way + draw.standard_normal(parameters)
        update *= {3: -1.0, 5: 7.0}.get(device, 1.0)
        gradient = (-update if device % 2 else update).astype(np.float32)[-LAST:]
        model = np.full(parameters, 0.3, dtype=np.float32) + update.astype(np.float32)
        found[device] = Report(round_, model, 1.0 + device, 1 + device, 1, gradient, 4)
    return found


def make_parts_of(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every model as a huge one."""
    monkeypatch.setattr(rows, "_WHOLE", 0)
    monkeypatch.setattr(rows, "_AT_ONCE", numbers)
    monkeypatch.setattr(rows, "_LEAST_WIDTH", 1)


def played(rule: Aggregator) -> Played:
    statistics = UpdateStatistics()
    model = np.full(PARAMETERS, 0.3, dtype=np.float32)
    for round_ in range(3):
        merged = rule.merge(model, reports(round_), statistics)
    return merged, statistics


@pytest.mark.parametrize("name", sorted(AGGREGATORS))
@pytest.mark.parametrize("at_once", [1, 450, 1799])
def test_a_model_merged_in_parts_is_the_same_to_the_bit(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, learnt = played(AGGREGATORS[name]())
    make_parts_of(at_once, monkeypatch)
    parts, learnt_in_parts = played(AGGREGATORS[name]())
    np.testing.assert_array_equal(parts.model, whole.model)
    assert parts.filtered == whole.filtered
    for device, report in whole.reports.items():
        np.testing.assert_array_equal(parts.model_of(device), whole.model_of(device))
        assert parts.reports[device].weight == pytest.approx(report.weight, rel=1e-12)
        gradient = parts.reports[device].local_gradient
        assert (gradient is None) == (report.local_gradient is None)
    for key, array in learnt.snapshot().items():
        np.testing.assert_allclose(learnt_in_parts.snapshot()[key], array, rtol=1e-12, atol=1e-14)


class Shortest(FedAvg):
    """A rule of somebody's own that needs whole updates, on a class that does not."""

    def step(self, updates: RoundUpdates) -> FloatArray:
        row = np.argmin(np.linalg.norm(updates.vectors, axis=1))
        return np.asarray(updates.vectors[row])


def test_a_rule_of_ones_own_sees_whole_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    make_parts_of(50, monkeypatch)
    sent = list(reports(0).values())
    model = np.full(PARAMETERS, 0.3, dtype=np.float32)
    lengths = [float(np.linalg.norm(r.model - model)) for r in sent]
    shortest = sent[int(np.argmin(lengths))].model
    np.testing.assert_allclose(Shortest().aggregate(model, sent), shortest, atol=1e-6)


def peak_of(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("rule", [FedAvg(), RobustMean()], ids=str)
def test_a_large_merge_takes_less_memory_than_its_updates(
    rule: Aggregator, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = 100_000
    make_parts_of(10_000, monkeypatch)
    sent = reports(0, parameters)
    model: Vector = np.full(parameters, 0.3, dtype=np.float32)
    updates = 8 * parameters * DEVICES

    def merge() -> object:
        return rule.merge(model, sent, UpdateStatistics())

    assert peak_of(merge) < 0.75 * updates
