"""Rounds closed from sums alone: the model and the state of a server that saw every report."""

from typing import Literal

import numpy as np
import pytest

from fedkeep.core.aggregation import AGGREGATORS, Aggregator, FedAvg, UpdateSum
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.estimators import GivenEstimator, GlobalEstimator, IncrementalEstimator
from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.schedule import Schedule
from fedkeep.core.server import Server
from fedkeep.core.types import Profile, Report

MODEL = np.array([1.0, -2.0, 0.5, 3.0], dtype=np.float32)


def server_of(estimator: GlobalEstimator, aggregation: Aggregator = FedAvg()) -> Server:
    server = Server(
        model=MODEL,
        gradient_size=2,
        regions=3,
        schedule=Schedule(learning_rate=0.1, epochs=2),
        coordinator=Greedy(clients_per_label=2, labels_per_client=2),
        estimator=estimator,
        aggregation=aggregation,
    )
    server.coordinate({d: Profile(6, np.array([1.0, 2.0, 3.0])) for d in range(4)})
    return server


def reports() -> dict[int, Report]:
    rng = np.random.default_rng(0)
    return {
        d: Report(0, MODEL + rng.uniform(-1, 1, 4).astype(np.float32), 1.0 + d, 1 + d, 3, None)
        for d in range(3)
    }


def sum_of(given: dict[int, Report], *, per_step: bool = False) -> UpdateSum:
    weighted = [
        (r.model.astype(np.float64) - MODEL) * r.weight / (r.steps if per_step else 1)
        for r in given.values()
    ]
    weight = sum(r.weight for r in given.values())
    return UpdateSum(
        np.sum(weighted, axis=0), weight, sum(r.weight * r.steps for r in given.values())
    )


@pytest.mark.parametrize("name", ["fedavg", "fednova"])
def test_sums_give_the_model_that_reports_give(name: Literal["fedavg", "fednova"]) -> None:
    seen, unseen = (server_of(GivenEstimator(), AGGREGATORS[name]()) for _ in range(2))
    for server in (seen, unseen):
        server.open_round([0, 1, 2, 3])
    for device, report in reports().items():
        assert seen.receive(device, report) is None
    expected = seen.close_round()
    summary = unseen.close_sum(reports(), sum_of(reports(), per_step=name == "fednova"), None)
    np.testing.assert_allclose(unseen.model, seen.model, atol=1e-6)
    assert (summary.round, summary.accepted, summary.missing) == (0, expected.accepted, (3,))
    assert unseen.round == 1
    assert [unseen.order(d).accepted_round for d in range(4)] == [0, 0, 0, None]


def test_what_a_sum_left_behind_survives_a_restart() -> None:
    first, second = (server_of(GivenEstimator()) for _ in range(2))
    first.open_round([0, 1, 2])
    first.close_sum(reports(), sum_of(reports()), np.array([0.5, -0.5], dtype=np.float32))
    second.restore(first.snapshot())
    assert second.model.tobytes() == first.model.tobytes()
    assert second.order(0).direction.tolist() == [0.5, -0.5]  # type: ignore[union-attr]
    assert second.order(0).accepted_round == 0


def test_a_sum_without_weight_or_estimators_changes_neither() -> None:
    server = server_of(GivenEstimator(np.ones(2, dtype=np.float32)))
    server.open_round([0, 1])
    server.close_sum([0, 1], UpdateSum(np.zeros(4), 0.0), None)
    assert server.model is MODEL
    assert server.estimator.direction().tolist() == [1.0, 1.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("total", "direction", "reason"),
    [
        (UpdateSum(np.full(4, 1e6), 1.0), None, "large-update"),
        (UpdateSum(np.full(4, 1e6), 0.0), None, "large-update"),
        (UpdateSum(np.zeros(4), -1.0), None, "bad-weight"),
        (UpdateSum(np.zeros(4), 1.0), np.full(2, 1e6, dtype=np.float32), "large-estimator"),
    ],
)
def test_sums_that_sound_reports_cannot_make_are_refused(
    total: UpdateSum, direction: np.ndarray | None, reason: str
) -> None:
    server = server_of(GivenEstimator())
    server.open_round([0, 1])
    with pytest.raises(RejectedError, match=reason):
        server.close_sum([0, 1], total, direction)
    assert server.model is MODEL
    assert server.round == 0


@pytest.mark.parametrize("name", ["trimmed", "norm-bounded"])
def test_robust_means_cannot_work_on_a_sum(name: Literal["trimmed", "norm-bounded"]) -> None:
    with pytest.raises(ConfigError, match="single reports"):
        AGGREGATORS[name]().apply(MODEL, UpdateSum(np.zeros(4), 1.0))


def test_an_estimator_that_keeps_single_gradients_takes_no_sum() -> None:
    server = server_of(IncrementalEstimator())
    server.open_round([0])
    with pytest.raises(TypeError, match="cannot be given"):
        server.close_sum([0], UpdateSum(np.zeros(4), 0.0), None)
