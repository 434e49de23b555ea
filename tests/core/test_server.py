"""The server's rounds: every report counts once, at the right time, or is rejected by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedkeep.core import screening
from fedkeep.core import server as core_server
from fedkeep.core.aggregation import Aggregator, FedAvg, RobustMean, pipeline
from fedkeep.core.aggregation.robust.clip import GradientClip
from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.claims import ClaimAudit
from fedkeep.core.errors import ConfigError
from fedkeep.core.gradients import (
    GivenEstimator,
    GlobalEstimator,
    IncrementalEstimator,
    RoundMeanEstimator,
)
from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.schedule import Schedule
from fedkeep.core.screening import Limits
from fedkeep.core.server import Server
from fedkeep.core.types import Profile, Report

LABELS = 3


def server_of(
    devices: int = 6,
    estimator: GlobalEstimator | None = None,
    aggregation: Aggregator = FedAvg(),
    **options: Any,
) -> Server:
    server = Server(
        model=np.ones(4, dtype=np.float32),
        gradient_size=2,
        regions=LABELS,
        schedule=Schedule(learning_rate=0.1, epochs=2),
        coordinator=Greedy(clients_per_label=2, labels_per_client=2),
        estimator=estimator or IncrementalEstimator(),
        aggregation=aggregation,
        seed=1,
        **options,
    )
    server.coordinate({d: Profile(6, np.array([1.0, 2.0, 3.0]) * (d + 1)) for d in range(devices)})
    return server


def report(round_: int, value: float = 1.1, weight: float = 1.0, gradient: float = 1.0) -> Report:
    return Report(
        round_,
        np.full(4, value, dtype=np.float32),
        weight,
        2,
        3,
        np.full(2, gradient, dtype=np.float32),
        5,
    )


def test_a_round_merges_models_and_estimators() -> None:
    server = server_of()
    orders = server.open_round([0, 1])
    assert orders[0].direction is None
    assert orders[0].accepted_round is None
    server.receive(0, report(0, 1.2, weight=1.0, gradient=2.0))
    server.receive(1, report(0, 1.4, weight=1.0, gradient=4.0))
    summary = server.close_round()
    assert summary.accepted == (0, 1)
    np.testing.assert_allclose(server.model, 1.3, rtol=1e-6)
    order = server.open_round([0])[0]
    assert order.accepted_round == 0
    # Rates 6 and 12 weigh the estimators, whatever the reports weigh.
    np.testing.assert_allclose(order.direction, (2 * 6 + 4 * 12) / 18, rtol=1e-6)  # type: ignore[arg-type]


def test_a_duplicate_counts_once() -> None:
    server = server_of()
    server.open_round([0])
    assert server.receive(0, report(0, 1.2)) is None
    rejection = server.receive(0, report(0, 9.0))
    assert rejection is not None
    assert rejection.reason == "duplicate"
    server.close_round()
    np.testing.assert_allclose(server.model, 1.2, rtol=1e-6)


def test_a_late_report_gives_its_estimator_but_not_its_model() -> None:
    server = server_of()
    server.open_round([0, 1])
    server.receive(1, report(0, 1.0, gradient=1.0))
    server.close_round()
    server.open_round([2])
    rejection = server.receive(0, report(0, 5.0, gradient=3.0))
    assert rejection is not None
    assert rejection.reason == "late"
    server.close_round()
    np.testing.assert_allclose(server.model, 1.0, rtol=1e-6)
    order = server.open_round([0])[0]
    assert order.accepted_round == 0, "the device may forget what it sent"
    np.testing.assert_allclose(order.direction, (1 * 12 + 3 * 6) / 18, rtol=1e-6)  # type: ignore[arg-type]


def test_a_robust_mean_ignores_late_estimators() -> None:
    """No update of the same round confirms it: an attacker would only have to be late."""
    server = server_of(aggregation=RobustMean())
    server.open_round([0, 1])
    server.receive(1, report(0, gradient=-1.0))
    server.close_round()
    before = server.open_round([2])[2].direction
    server.receive(0, report(0, gradient=3.0))
    server.close_round()
    order = server.open_round([0])[0]
    np.testing.assert_array_equal(order.direction, before)  # type: ignore[arg-type]
    assert order.accepted_round is None, "the device keeps what it has not been thanked for"


@pytest.mark.parametrize("estimator", [IncrementalEstimator(), RoundMeanEstimator()])
def test_a_late_estimator_counts_at_the_close_of_the_round_and_not_before(
    estimator: GlobalEstimator,
) -> None:
    """Else participants of one round would get different directions."""
    server = server_of(estimator=estimator)
    server.open_round([0, 1])
    server.receive(1, report(0, gradient=1.0))
    server.close_round()
    server.open_round([2])
    before = server.order(2).direction
    server.receive(0, report(0, gradient=3.0))
    np.testing.assert_array_equal(server.order(2).direction, before)  # type: ignore[arg-type]
    server.receive(2, report(1, gradient=1.0))
    server.close_round()
    rates = {0: 6, 2: 18} if isinstance(estimator, RoundMeanEstimator) else {0: 6, 1: 12, 2: 18}
    expected = (3 * 6 + sum(rate for device, rate in rates.items() if device)) / sum(rates.values())
    np.testing.assert_allclose(server.order(0).direction, expected, rtol=1e-6)  # type: ignore[arg-type]
    assert server.order(0).accepted_round == 0


@pytest.mark.parametrize(("others", "length"), [(4, 10.0), (3, 500.0)])
def test_a_long_estimator_is_shortened_once_there_are_others_to_compare(
    others: int, length: float
) -> None:
    server = server_of(estimator=RoundMeanEstimator())
    sent = {d: report(0, gradient=0.5**0.5) for d in range(others)}
    sent[5] = replace(report(0), local_gradient=np.array([300.0, 400.0], dtype=np.float32))
    server.open_round(sent)
    for device, one in sent.items():
        server.receive(device, one)
    server.close_round()
    rates = np.array([6.0 * (d + 1) for d in sent])
    expected = (
        rates[:-1].sum() * np.full(2, 0.5**0.5) + rates[-1] * length * np.array([0.6, 0.8])
    ) / rates.sum()
    np.testing.assert_allclose(server.order(0).direction, expected, rtol=1e-6)  # type: ignore[arg-type]


def test_a_report_later_than_the_staleness_bound_is_discarded_whole() -> None:
    server = server_of(staleness=1)
    for _ in range(3):
        server.open_round([1])
        server.close_round()
    server.open_round([1])
    server.receive(0, report(0))
    server.close_round()
    assert server.estimator.direction() is None


@pytest.mark.parametrize(
    ("device", "bad", "reason"),
    [
        (3, report(0), "not-asked"),
        (0, report(5), "not-asked"),
        (0, replace(report(0), weight=float("nan")), "bad-weight"),
        (0, report(0, float("nan")), "model-not-finite"),
    ],
)
def test_the_offender_is_named_and_the_rest_goes_on(device: int, bad: Report, reason: str) -> None:
    server = server_of()
    server.open_round([0, 1])
    server.receive(1, report(0, 1.5))
    server.receive(device, bad)
    summary = server.close_round()
    assert [(r.device, r.reason) for r in summary.rejections] == [(device, reason)]
    assert summary.accepted == (1,)
    np.testing.assert_allclose(server.model, 1.5, rtol=1e-6)


def test_a_lying_weight_counts_no_more_than_the_devices_slots() -> None:
    server = server_of()
    server.open_round([0, 1])
    server.receive(0, report(0, 2.0, weight=1e12))
    server.receive(1, report(0, 1.0, weight=6.0))
    server.close_round()
    assert server.model[0] < 1.9


def test_no_data_is_participation_not_failure() -> None:
    server = server_of()
    server.open_round([0, 1, 2])
    server.receive(0, report(0, weight=0.0))
    server.receive(1, report(0, 1.5))
    summary = server.close_round()
    assert (summary.empty, summary.accepted, summary.missing) == ((0,), (1,), (2,))


def test_an_invalid_profile_is_left_out_of_the_plan_by_name() -> None:
    server = server_of()
    good = Profile(6, np.ones(LABELS))
    plan, rejections = server.coordinate(
        {0: good, 1: Profile(6, np.array([1.0, np.nan, 1.0])), 2: good}
    )
    assert [(r.device, r.reason) for r in rejections] == [(1, "velocity-not-finite")]
    assert plan.devices.tolist() == [0, 2]


def test_a_device_that_left_no_longer_counts() -> None:
    server = server_of()
    server.open_round([0, 1])
    server.receive(0, report(0, gradient=9.0))
    server.receive(1, report(0, gradient=1.0))
    server.close_round()
    server.coordinate({d: Profile(6, np.ones(LABELS)) for d in range(1, 6)})
    np.testing.assert_allclose(server.estimator.direction(), 1.0)  # type: ignore[arg-type]


def test_a_late_report_of_a_device_that_left_is_rejected_whole() -> None:
    server = server_of()
    server.open_round([0])
    server.close_round()
    server.coordinate({d: Profile(6, np.ones(LABELS)) for d in range(1, 6)})
    server.open_round([1])
    rejection = server.receive(0, report(0))
    assert rejection is not None
    assert rejection.reason == "left"
    server.close_round()
    assert server.estimator.direction() is None


def test_a_device_that_leaves_after_it_reported_no_longer_counts() -> None:
    server = server_of()
    server.open_round([0, 1])
    server.receive(0, report(0, value=1.5, gradient=5.0))
    server.receive(1, report(0, value=1.2, gradient=2.0))
    server.coordinate({d: Profile(6, np.array([1.0, 2.0, 3.0]) * (d + 1)) for d in range(1, 6)})
    server.close_round()
    np.testing.assert_allclose(server.model, 1.2, rtol=1e-6)
    np.testing.assert_allclose(server.order(1).direction, 2.0, rtol=1e-6)  # type: ignore[arg-type]


def test_selection_depends_on_seed_and_round_alone() -> None:
    one, two = server_of(), server_of()
    chosen = [one.select(r, range(100), 10) for r in range(20)]
    assert chosen == [two.select(r, range(100), 10) for r in range(20)]
    assert len({tuple(c) for c in chosen}) == 20
    assert all(len(set(c)) == 10 for c in chosen)


def test_a_restored_server_goes_on_to_the_bit() -> None:
    def play(server: Server, rounds: range, *, restart_at: int = -1) -> Server:
        rng = np.random.default_rng(rounds.start)
        for round_ in rounds:
            server.open_round(server.select(round_, range(6), 3))
            for device in server.select(round_, range(6), 3):
                server.receive(device, report(round_, 1 + rng.random(), gradient=rng.random()))
            server.close_round()
            if round_ == restart_at:
                state = server.snapshot()
                server = server_of()
                server.restore(state)
        return server

    steady = play(server_of(), range(12))
    restarted = play(server_of(), range(12), restart_at=5)
    np.testing.assert_array_equal(steady.model, restarted.model)
    np.testing.assert_array_equal(steady.estimator.direction(), restarted.estimator.direction())
    assert steady.round == restarted.round == 12


def test_the_learning_rate_falls_by_rounds() -> None:
    schedule = Schedule(learning_rate=1.0, epochs=1, decay=0.5, decay_every=10)
    assert [schedule.local(r).learning_rate for r in (0, 9, 10, 20, 30)] == [
        1.0,
        1.0,
        0.5,
        0.25,
        0.125,
    ]


def foreign_plan(*devices: int) -> Plan:
    """A plan from profiles that the server has not seen: rates of 6, 12, 18 and so on."""
    profiles = {d: Profile(6, np.array([1.0, 2.0, 3.0]) * (d + 1)) for d in devices}
    return Greedy(clients_per_label=2, labels_per_client=2).plan(FleetProfiles.of(profiles))


def test_under_a_plan_made_elsewhere_every_estimator_counts_alike_and_leavers_are_forgotten() -> (
    None
):
    server = server_of()
    server.open_round([4, 5])
    server.receive(5, report(0, gradient=9.0))
    server.close_round()
    server.use_plan(foreign_plan(0, 1, 2))
    assert set(server.open_round([0, 1])) == {0, 1}
    server.receive(0, report(1, gradient=2.0))
    server.receive(1, report(1, gradient=4.0))
    assert server.receive(5, report(0)).reason == "left"  # type: ignore[union-attr]
    server.close_round()
    np.testing.assert_allclose(server.order(0).direction, 3.0)  # type: ignore[arg-type]


def test_under_a_plan_made_elsewhere_no_report_weighs_more_than_ten_mean_devices() -> None:
    plan = foreign_plan(0, 1, 2)
    server = server_of()
    server.use_plan(plan)
    restored = server_of()
    restored.restore(server.snapshot())
    mean = 6 * (1 + 2 + 3) / 3 / plan.mass_per_slot
    for each in (server, restored):
        each.open_round([0, 1])
        assert each.receive(0, report(0, weight=9.9 * mean)) is None
        each.receive(1, report(0, weight=1e6))
        rejections = each.close_round().rejections
        assert [(r.device, r.reason) for r in rejections] == [(1, "weight-cut")]
        assert f"counts as {10.01 * mean:g}" in rejections[0].detail


def test_an_update_longer_than_usual_is_shortened_and_one_far_longer_rejected() -> None:
    server = server_of()
    server.open_round(range(6))
    for device, step in enumerate((0.1, 0.1, 0.1, 0.1, 3.0, 30.0)):
        server.receive(device, report(0, 1 + step))
    summary = server.close_round()
    assert [(r.device, r.reason) for r in summary.rejections] == [
        (4, "update-cut"),
        (5, "large-update"),
    ]
    assert summary.accepted == (0, 1, 2, 3, 4)
    np.testing.assert_allclose(server.model, 1 + (4 * 0.1 + 10 * 0.1) / 5, rtol=1e-5)


def test_a_rejected_devices_earlier_gist_is_dropped() -> None:
    server = server_of(aggregation=RobustMean())
    for sign in (1.0, -1.0):
        server.open_round(range(6))
        for device in range(6):
            gradient = sign if device == 5 else 1.0
            server.receive(
                device, report(server.round, float(server.model[0]) - 0.1, gradient=gradient)
            )
        server.close_round()
    assert 5 not in server.estimator.snapshot()["devices"]
    assert 4 in server.estimator.snapshot()["devices"]


@pytest.mark.parametrize(
    "name",
    ["model", "round", "plan", "estimator", "aggregation", "limits", "schedule", "staleness"],
)
def test_only_the_server_changes_its_state(name: str) -> None:
    server = server_of()
    with pytest.raises(AttributeError):
        setattr(server, name, getattr(server, name))


def test_a_first_model_can_be_set_and_a_closed_round_corrected_and_nothing_else() -> None:
    server = server_of()
    server.set_model(np.zeros(4, dtype=np.float32))
    assert not server.open_round([0])[0].model.any()
    with pytest.raises(RuntimeError, match="a round is open"):
        server.apply_step(np.ones(4, dtype=np.float32))
    server.close_round()
    server.apply_step(np.full(4, 3.0, dtype=np.float32))
    assert server.open_round([0])[0].model.tolist() == [3.0] * 4
    with pytest.raises(RuntimeError, match="after the first round"):
        server.set_model(np.zeros(4, dtype=np.float32))


def test_only_an_oracle_sets_the_global_gradient() -> None:
    given = server_of(estimator=GivenEstimator())
    given.set_global_gradient(np.ones(2, dtype=np.float32))
    assert given.order(0).direction is not None
    for estimator in (IncrementalEstimator(), RoundMeanEstimator()):
        with pytest.raises(TypeError, match="estimates g_hat from reports"):
            server_of(estimator=estimator).set_global_gradient(None)


# With limits.enabled = false nothing is cut; forms and replays are checked all the same.

UNLIMITED = Limits(enabled=False)


def test_without_limits_rates_and_capacities_count_as_declared() -> None:
    """Nine devices at rate 10 and one at 100: gamma is (1.42, 0.58) by Eq.

    11, (1.25, 0.75) capped.
    """
    profiles = {d: Profile(6, np.array([9.0, 1.0])) for d in range(9)}
    profiles[9] = Profile(60, np.array([80.0, 20.0]))

    def planned(limits: Limits) -> tuple[Plan, tuple[Any, ...], Server]:
        server = Server(
            model=np.ones(4, dtype=np.float32), gradient_size=2, regions=2,
            schedule=Schedule(0.1, epochs=1), coordinator=Greedy(clients_per_label=1),
            estimator=IncrementalEstimator(), limits=limits,
        )  # fmt: skip
        plan, rejections = server.coordinate(profiles)
        return plan, rejections, server

    plan, rejections, server = planned(UNLIMITED)
    assert rejections == ()
    assert server.rate(9) == 100.0
    assert plan.quotas.sum() == 9 * 6 + 60
    gamma = np.array([161.0, 29.0]) / 190 / (plan.quotas.sum(axis=0) / plan.quotas.sum())
    np.testing.assert_allclose(plan.label_weights, gamma)
    capped, cuts, limited = planned(Limits())
    assert {r.reason for r in cuts} == {"rate-cut", "capacity-cut"}
    assert limited.rate(9) == 40.0
    assert capped.quotas.sum() == 9 * 6 + 24


def test_without_limits_a_round_is_eq_2_and_eq_8_as_printed() -> None:
    server = server_of(limits=UNLIMITED, estimator=RoundMeanEstimator())
    server.open_round(range(6))
    steps = np.array([0.1, 0.1, 0.1, 0.1, 3.0, 5000.0])
    weights = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1e6])
    gradients = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 5000.0])
    rows = zip(steps, weights, gradients, strict=True)
    for device, (step, weight, gradient) in enumerate(rows):
        assert server.receive(device, report(0, 1 + step, weight, gradient)) is None
    summary = server.close_round()
    assert (summary.rejections, summary.accepted) == ((), tuple(range(6)))
    np.testing.assert_allclose(server.model, 1 + steps @ weights / weights.sum(), rtol=1e-6)
    rates = 6.0 * np.arange(1, 7)
    expected = gradients @ rates / rates.sum()
    np.testing.assert_allclose(server.order(0).direction, expected, rtol=1e-6)  # type: ignore[arg-type]


def test_without_limits_no_code_of_the_cuts_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **named: object) -> None:
        raise AssertionError("a cut")

    for module, name in (
        (core_server, "cap_profiles"), (pipeline, "ClippedReports"), (pipeline, "weight_cap"),
        (screening, "_require_plausible"), (GradientClip, "clip"),
        (UpdateStatistics, "learn_lengths"),
        (ClaimAudit, "observe"), (ClaimAudit, "review"), (ClaimAudit, "discount"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, never)
    server = server_of(limits=UNLIMITED)
    for round_ in range(8):
        server.open_round(range(6))
        for device in range(6):
            server.receive(device, report(round_))
        server.close_round()
    assert server.round == 8


@pytest.mark.parametrize(
    ("device", "bad", "reason"),
    [
        (0, replace(report(0), model=np.ones(5, dtype=np.float32)), "model-shape"),
        (0, report(0, float("inf")), "model-not-finite"),
        (0, report(0, gradient=float("nan")), "estimator-not-finite"),
        (0, report(0, weight=float("nan")), "bad-weight"),
        (3, report(0), "not-asked"),
    ],
)
def test_without_limits_forms_and_replays_are_checked(
    device: int, bad: Report, reason: str
) -> None:
    server = server_of(limits=UNLIMITED)
    server.open_round([0, 1])
    server.receive(1, report(0))
    for sender, sent, why in ((device, bad, reason), (1, report(0), "duplicate")):
        rejection = server.receive(sender, sent)
        assert rejection is not None
        assert rejection.reason == why


def test_a_rule_that_clips_by_itself_does_not_run_without_limits() -> None:
    with pytest.raises(ConfigError, match=r"limits\.enabled = false switches off"):
        server_of(limits=UNLIMITED, aggregation=RobustMean())
