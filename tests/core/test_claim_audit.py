"""Claims that reports do not bear out count less: labels nobody stores, rates nobody sees."""

import numpy as np
import pytest

from fedkeep.core.gradients import RoundMeanEstimator
from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.schedule import Schedule
from fedkeep.core.server import Server
from fedkeep.core.types import DeviceId, Profile, Report, Vector

MODEL: Vector = np.ones(4, dtype=np.float32)
HONEST, SQUATTER, RARE = 6, 6, 2


def profile(device: DeviceId) -> Profile:
    """Everybody sees two labels; the squatter claims the third, device 0 sees a little of it."""
    velocity = np.array([5.0, 5.0, 1.0 if device == 0 else 0.0])
    return Profile(6, np.array([0.0, 0.0, 9.0]) if device == SQUATTER else velocity)


def server() -> Server:
    made = Server(
        model=MODEL, gradient_size=4, regions=3, schedule=Schedule(0.1, 1),
        coordinator=Greedy(clients_per_label=1, labels_per_client=2),
        estimator=RoundMeanEstimator(),
    )  # fmt: skip
    made.coordinate({device: profile(device) for device in range(HONEST + 1)})
    return made


def play(
    made: Server, samples: dict[DeviceId, int], arrivals: dict[DeviceId, int]
) -> list[tuple[int, str]]:
    made.open_round(range(HONEST + 1))
    for device in range(HONEST + 1):
        update = (MODEL + 0.01 * (device + 1)).astype(np.float32)
        held, counted = samples.get(device, 6), arrivals.get(device, 10)
        report = Report(made.round, update, float(held > 0), 1, held, MODEL, counted)
        assert made.receive(device, report) is None
    return [(rejection.device, rejection.reason) for rejection in made.close_round().rejections]


def holders(made: Server, label: int) -> list[int]:
    assert made.plan is not None
    return np.flatnonzero(made.plan.quotas[:, label]).tolist()


def test_a_squatter_loses_its_label_to_another() -> None:
    made = server()
    assert holders(made, RARE) == [SQUATTER]
    named = [found for _ in range(6) for found in play(made, {SQUATTER: 0}, {})]
    assert (SQUATTER, "claim-unfounded") in named
    assert holders(made, RARE) == [0]
    assert {device for device, reason in named if reason == "claim-unfounded"} == {SQUATTER}


def test_it_is_given_another_chance_later() -> None:
    made = server()
    for _ in range(6):
        play(made, {SQUATTER: 0}, {})
    for _ in range(50):
        play(made, {}, {})
    assert SQUATTER in holders(made, RARE)


def test_a_rate_counts_as_far_as_arrivals_confirm_it() -> None:
    made = server()
    declared = made.rate(1)
    for _ in range(8):
        play(made, {}, {1: 1})
    assert made.rate(1) == pytest.approx(declared / 10, rel=0.05)
    assert made.rate(2) == declared


def test_what_was_found_outlives_a_restart() -> None:
    made, again = server(), server()
    for _ in range(6):
        play(made, {SQUATTER: 0}, {})
    again.restore(made.snapshot())
    again.coordinate({device: profile(device) for device in range(HONEST + 1)})
    assert holders(again, RARE) == [0]


def test_honest_devices_keep_what_they_hold() -> None:
    made = server()
    before = made.plan
    assert all(play(made, {}, {}) == [] for _ in range(20))
    assert made.plan is before


def test_counts_of_one_a_report_penalise_no_device_however_much_rates_differ() -> None:
    made = server()
    made.coordinate({d: Profile(6, np.array([50.0**d / 100, 1.0, 1.0])) for d in range(HONEST + 1)})
    once = dict.fromkeys(range(HONEST + 1), 1)
    assert all(reason != "claim-unfounded" for _ in range(12) for _, reason in play(made, {}, once))


def test_a_slow_stream_is_no_squatter() -> None:
    made = server()
    slow = np.array([0.05, 0.05, 0.0])
    made.coordinate(
        {d: Profile(6, slow if d == 3 else np.array([5.0, 5.0, 1.0])) for d in range(HONEST + 1)}
    )
    assert all(
        reason != "claim-unfounded" for _ in range(12) for _, reason in play(made, {3: 1}, {3: 0})
    )
