"""The server's rounds: every report counts once, at the right time, or is refused by name."""

from dataclasses import replace

import numpy as np
import pytest

from fedkeep.core.aggregation import Aggregation
from fedkeep.core.gradients import GlobalEstimator, IncrementalEstimator, RoundMeanEstimator
from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.rounds import Schedule
from fedkeep.core.server import Server
from fedkeep.core.types import Profile, Report

LABELS = 3


def server_of(devices: int = 6, **profiles: Profile) -> Server:
    server = Server(
        model=np.ones(4, dtype=np.float32),
        gradient_size=2,
        regions=LABELS,
        schedule=Schedule(learning_rate=0.1, epochs=2),
        coordinator=Greedy(clients_per_label=2, labels_per_client=2),
        estimator=IncrementalEstimator(),
        seed=1,
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
    refusal = server.receive(0, report(0, 9.0))
    assert refusal is not None
    assert refusal.reason == "duplicate"
    server.close_round()
    np.testing.assert_allclose(server.model, 1.2, rtol=1e-6)


def test_a_late_report_gives_its_estimator_but_not_its_model() -> None:
    server = server_of()
    server.open_round([0, 1])
    server.receive(1, report(0, 1.0, gradient=1.0))
    server.close_round()
    server.open_round([2])
    refusal = server.receive(0, report(0, 5.0, gradient=3.0))
    assert refusal is not None
    assert refusal.reason == "late"
    server.close_round()
    np.testing.assert_allclose(server.model, 1.0, rtol=1e-6)
    order = server.open_round([0])[0]
    assert order.accepted_round == 0, "the device may forget what it sent"
    np.testing.assert_allclose(order.direction, (1 * 12 + 3 * 6) / 18, rtol=1e-6)  # type: ignore[arg-type]


def test_a_robust_mean_believes_no_late_estimator() -> None:
    """No update of the same round bears it out: a liar would only have to be late."""
    server = server_of()
    server.aggregation = Aggregation("robust")
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
    """Else participants of one round would get different directions, or one late device would be the direction."""
    server = server_of()
    server.estimator = estimator
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
    server = server_of()
    server.estimator = RoundMeanEstimator()
    told = {d: report(0, gradient=0.5**0.5) for d in range(others)}
    told[5] = replace(report(0), local_gradient=np.array([300.0, 400.0], dtype=np.float32))
    server.open_round(told)
    for device, one in told.items():
        server.receive(device, one)
    server.close_round()
    rates = np.array([6.0 * (d + 1) for d in told])
    expected = (
        rates[:-1].sum() * np.full(2, 0.5**0.5) + rates[-1] * length * np.array([0.6, 0.8])
    ) / rates.sum()
    np.testing.assert_allclose(server.order(0).direction, expected, rtol=1e-6)  # type: ignore[arg-type]


def test_a_report_later_than_the_staleness_bound_is_discarded_whole() -> None:
    server = server_of()
    server.staleness = 1
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
    assert [(r.device, r.reason) for r in summary.refusals] == [(device, reason)]
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


def test_an_unsound_profile_is_left_out_of_the_plan_by_name() -> None:
    server = server_of()
    good = Profile(6, np.ones(LABELS))
    plan, refusals = server.coordinate(
        {0: good, 1: Profile(6, np.array([1.0, np.nan, 1.0])), 2: good}
    )
    assert [(r.device, r.reason) for r in refusals] == [(1, "velocity-not-finite")]
    assert plan.devices.tolist() == [0, 2]


def test_a_device_that_left_no_longer_counts() -> None:
    server = server_of()
    server.open_round([0, 1])
    server.receive(0, report(0, gradient=9.0))
    server.receive(1, report(0, gradient=1.0))
    server.close_round()
    server.coordinate({d: Profile(6, np.ones(LABELS)) for d in range(1, 6)})
    np.testing.assert_allclose(server.estimator.direction(), 1.0)  # type: ignore[arg-type]


def test_a_late_report_of_a_device_that_left_is_refused_whole() -> None:
    server = server_of()
    server.open_round([0])
    server.close_round()
    server.coordinate({d: Profile(6, np.ones(LABELS)) for d in range(1, 6)})
    server.open_round([1])
    refusal = server.receive(0, report(0))
    assert refusal is not None
    assert refusal.reason == "left"
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
        refusals = each.close_round().refusals
        assert [(r.device, r.reason) for r in refusals] == [(1, "weight-cut")]
        assert f"counts as {10.01 * mean:g}" in refusals[0].detail


def test_an_update_longer_than_usual_is_shortened_and_one_far_longer_refused() -> None:
    server = server_of()
    server.open_round(range(6))
    for device, step in enumerate((0.1, 0.1, 0.1, 0.1, 3.0, 30.0)):
        server.receive(device, report(0, 1 + step))
    summary = server.close_round()
    assert [(r.device, r.reason) for r in summary.refusals] == [
        (4, "update-cut"),
        (5, "large-update"),
    ]
    assert summary.accepted == (0, 1, 2, 3, 4)
    np.testing.assert_allclose(server.model, 1 + (4 * 0.1 + 10 * 0.1) / 5, rtol=1e-5)


def test_a_liars_earlier_gist_leaves_with_its_word() -> None:
    server = server_of()
    server.aggregation = Aggregation("robust")
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
