"""What each kind of sample weight is unbiased for, on a fleet whose stores are full."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.types import Assignment
from fedkeep.core.weighting import Weighting, label_weights

UNEVEN = FleetProfiles.numbered([20, 40, 20], [[400, 200, 300], [2, 300, 200], [300, 0, 4]])


def weighted_mass(client_label: float, labels_per_client: int | None) -> np.ndarray:
    """The weights of all stored samples, summed by device and label, (C, Y)."""
    plan = Greedy(2, labels_per_client).plan(UNEVEN)
    mass = np.zeros(UNEVEN.velocities.shape)
    for device in range(len(UNEVEN)):
        regions = np.repeat(np.arange(UNEVEN.labels), plan.quotas[device])
        weights = Weighting(client_label).weigh(
            regions, plan.assignment(device), UNEVEN.velocities[device]
        )
        np.add.at(mass[device], regions, weights)
    return mass


def test_label_weights_are_unbiased_for_the_labels_of_the_fleet() -> None:
    mass = weighted_mass(0.0, labels_per_client=None)
    stream = UNEVEN.velocities
    assert mass.sum(axis=0) / mass.sum() == pytest.approx(stream.sum(axis=0) / stream.sum())
    assert not np.allclose(mass / mass.sum(), stream / stream.sum()), (
        "but not for devices and labels jointly"
    )


def test_client_label_weights_are_unbiased_for_devices_and_labels_jointly() -> None:
    mass = weighted_mass(1.0, labels_per_client=None)
    assert mass / mass.sum() == pytest.approx(UNEVEN.velocities / UNEVEN.velocities.sum())


def test_client_label_weights_keep_each_devices_rate_when_labels_are_divided() -> None:
    mass = weighted_mass(1.0, labels_per_client=2)
    stream = UNEVEN.velocities
    assert mass.sum(axis=1) / mass.sum() == pytest.approx(stream.sum(axis=1) / stream.sum())


@pytest.mark.parametrize("client_label", [0.0, 0.3, 1.0])
def test_all_kinds_are_on_one_scale(client_label: float) -> None:
    """A sample weighs 1 on average, so that shrinkage mixes like with like."""
    assert weighted_mass(client_label, labels_per_client=2).sum() == pytest.approx(80)


def test_shrinkage_is_linear() -> None:
    none, some, full = (weighted_mass(share, 2) for share in (0.0, 0.25, 1.0))
    assert some == pytest.approx(0.75 * none + 0.25 * full)


def test_what_is_seen_but_not_stored_is_spread() -> None:
    assignment = Assignment(np.array([2, 1, 0]), np.array([1.0, 1.0, 0.0]), mass_per_slot=2.0)
    found = Weighting(1.0).weigh(np.array([0, 0, 1]), assignment, np.array([6.0, 2.0, 4.0]))
    assert found.tolist() == [
        2.25,
        2.25,
        1.5,
    ]  # 12 arrivals, 6 : 2 between the two held, over mass 2


def test_an_empty_store_has_no_weights() -> None:
    assignment = Assignment(np.array([2, 1]), np.ones(2), mass_per_slot=2.0)
    found = Weighting(1.0).weigh(np.array([], dtype=np.int64), assignment, np.array([6.0, 2.0]))
    assert len(found) == 0


def test_samples_whose_label_no_longer_arrives_share_the_devices_rate() -> None:
    assignment = Assignment(np.array([2, 1]), np.ones(2), mass_per_slot=1.0)
    found = Weighting(1.0).weigh(np.array([0, 0]), assignment, np.array([0.0, 3.0]))
    assert found.tolist() == [1.5, 1.5]


def test_without_any_known_rate_gamma_is_all_there_is() -> None:
    assignment = Assignment(np.array([2]), np.ones(1), mass_per_slot=0.0)
    assert Weighting(1.0).weigh(np.array([0, 0]), assignment, np.zeros(1)).tolist() == [1.0, 1.0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_gamma_times_the_stored_share_sums_to_one(pairs: list[tuple[int, int]]) -> None:
    mass, stored = np.array(pairs, dtype=float).T
    weights = label_weights(mass, stored.astype(np.int64))
    assert np.isfinite(weights).all()
    if (mass * stored).any():
        assert weights @ stored / stored.sum() == pytest.approx(1.0)


def test_a_share_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"client_label must be between 0 and 1, got 1\.5"):
        Weighting(1.5)
