"""Soft quotas: never over capacity, no label shut out for ever, independent of chunking."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.device import Device, DeviceOptions
from fedkeep.core.gradients import GivenEstimator
from fedkeep.core.planning.greedy import Greedy, Uncoordinated
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policies.reservoir import Reservoir
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.protocols import Learner
from fedkeep.core.schedule import Schedule
from fedkeep.core.server import Server
from fedkeep.core.store import AfterUse
from fedkeep.core.types import Batch, LocalTraining, Profile, TrainOrder
from fedkeep.core.velocity import KnownVelocity
from fedkeep.core.weighting import Weighting
from fedkeep.learn.dense_learner import DenseLearner

LABELS = 7
LEARNER: Learner = DenseLearner((2, LABELS))
MODEL = LEARNER.initial(0)


def device_of(
    policy: SelectionPolicy, capacity: int, seed: int = 0, **given_parts: object
) -> Device:
    parts = {"after_use": AfterUse("evict_trained_first"), **given_parts}
    device = Device(
        LEARNER, policy, capacity=capacity, sample_shape=(2,), labels=LABELS, seed=seed, **parts
    )  # type: ignore[arg-type]
    device.set_model(MODEL)
    return device


def arrivals(labels: list[int], first: int = 0) -> Batch:
    n = len(labels)
    rng = np.random.default_rng(first)
    return Batch(
        rng.standard_normal((n, 2)).astype(np.float32), np.array(labels), first + np.arange(n)
    )


def order(round_: int) -> TrainOrder:
    return TrainOrder(round_, MODEL, None, LocalTraining(0.01, 1), round_ - 1)


rounds = st.lists(
    st.lists(st.integers(0, LABELS - 1), min_size=1, max_size=20), min_size=1, max_size=6
)


@settings(deadline=None)
@given(
    rounds,
    st.integers(1, 6),
    st.sampled_from([BalancedReservoir, Reservoir, Ode]),
    st.lists(st.integers(1, 7), min_size=1),
)
def test_never_over_capacity_and_the_same_however_the_stream_is_cut(
    streams: list[list[int]], capacity: int, policy: type[SelectionPolicy], cuts: list[int]
) -> None:
    whole, cut = device_of(policy(), capacity), device_of(policy(), capacity)
    first = 0
    for round_, labels in enumerate(streams):
        batch, start = arrivals(labels, first), 0
        whole.observe(batch, float(round_))
        while start < len(labels):
            size = cuts[start % len(cuts)]
            cut.observe(batch.take(slice(start, start + size)), float(round_))
            assert len(cut.store.stored().batch) <= capacity
            start += size
        kept, seen = (device.store.stored().batch.ids.tolist() for device in (whole, cut))
        assert kept == seen
        assert len(kept) == min(capacity, first + len(labels)), "lent slots are used"
        for device in (whole, cut):
            device.participate(order(round_))
        first += len(labels)


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_no_label_seen_often_is_shut_out_for_ever(capacity: int) -> None:
    """Label 0 comes in runs, nine times as often as each of six others; slots are fewer."""
    device, held = device_of(BalancedReservoir(), capacity), np.zeros(LABELS)
    rounds = 200
    for round_ in range(rounds):
        labels = [0] * 9 + [1, 2, 3, 4, 5, 6]
        rotated = labels[round_ % 15 :] + labels[: round_ % 15]
        device.observe(arrivals(rotated, 15 * round_), float(round_))
        held += np.bincount(device.store.stored().batch.y, minlength=LABELS) > 0
        device.participate(order(round_))
    assert (held > 0.3 * rounds * capacity / 15).all(), held


@pytest.mark.parametrize("quotas", ["soft", "hard"])
def test_the_papers_quotas_are_one_word_away(quotas: str) -> None:
    """The plan has two slots for label 0 and two for label 1; only label 0 comes."""
    options = DeviceOptions(quotas=quotas)  # type: ignore[arg-type]
    device = device_of(Ode(), 4, options=options)
    velocities = np.zeros((1, LABELS))
    velocities[0, :2] = 1.0
    device.apply_plan(Greedy().plan(FleetProfiles.numbered([4], velocities)).assignment(0))
    device.observe(arrivals([0] * 10), 0.0)
    assert len(device.store.stored().batch) == (4 if quotas == "soft" else 2)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=LABELS, max_size=LABELS), min_size=3, max_size=6),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([Greedy, Uncoordinated]),
    st.lists(st.integers(0, LABELS - 1), min_size=1, max_size=40),
)
def test_no_honest_device_is_cut_whatever_its_slots_are_lent_to(
    rates: list[list[int]], capacity: int, client_label: float, coordinator: type, labels: list[int]
) -> None:
    """`Server.heaviest` bounds a device's weight; soft quotas hold other labels than planned."""
    velocities = np.array(rates, dtype=np.float64) + 1e-3
    server = Server(
        model=MODEL,
        gradient_size=LEARNER.gradient_size,
        regions=LABELS,
        schedule=Schedule(0.01, 1),
        coordinator=coordinator(),
        estimator=GivenEstimator(),
    )
    profiles = {device: Profile(capacity, row) for device, row in enumerate(velocities)}
    _, cut = server.coordinate(profiles)
    cut_devices = {refusal.device for refusal in cut}
    policy = Ode() if coordinator is Greedy else BalancedReservoir()
    weighting = Weighting(client_label if coordinator is Greedy else 1.0)
    for number in set(profiles) - cut_devices:
        device = device_of(
            policy, capacity, meter=KnownVelocity(velocities[number]), weighting=weighting
        )
        device.profile()
        device.observe(arrivals(labels), 0.0)
        report = device.participate(server.order(number))
        assert report.weight <= server.max_weight(number)
