"""Invariants of every partition, and the shapes that the tasks rely on."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.planning.assignment import apportion
from fedkeep.data import PARTITIONS, Ownership, partition_from
from fedkeep.data.federation import hold_out

TABLES: list[dict[str, Any]] = [
    {"name": "labels", "devices": 7, "labels": 3, "minimum": 2},
    {"name": "labels", "devices": 7, "labels": 99, "tail": 2.0, "minimum": 1},
    {"name": "shards", "devices": 7, "shards": 3},
    {"name": "dirichlet", "devices": 7, "alpha": 0.05, "minimum": 3},
    {"name": "iid", "devices": 7},
    {"name": "natural"},
]


def labels_of(seed: int, samples: int = 300, labels: int = 5) -> Any:
    return np.random.default_rng(seed).permutation(np.arange(samples) % labels)


def test_the_tables_cover_every_partition() -> None:
    assert {table["name"] for table in TABLES} == set(PARTITIONS)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t["name"])
@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_sample_is_used_at_most_once_and_no_device_is_empty(
    table: dict[str, Any], seed: int
) -> None:
    y = labels_of(seed)
    natural = np.arange(len(y)) % 7
    members = partition_from(table).divide(y, natural, seed)
    assert len(np.unique(members.indices)) == len(members.indices)
    assert members.indices.min() >= 0
    assert members.indices.max() < len(y)
    assert len(members) == 7
    assert members.sizes.min() > 0


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t["name"])
def test_the_same_seed_gives_the_same_division_and_another_gives_another(
    table: dict[str, Any],
) -> None:
    y = labels_of(0)
    divided = [
        partition_from(table).divide(y, np.arange(len(y)) % 7, seed).indices.tolist()
        for seed in (1, 1, 2)
    ]
    assert divided[0] == divided[1]
    assert (divided[0] != divided[2]) == (table["name"] != "natural")


def test_labels_gives_each_device_exactly_its_labels_and_a_long_tail() -> None:
    y = labels_of(3, samples=60_000, labels=10)
    members = partition_from({"name": "labels"}).divide(y, None, 0)
    owned = [np.unique(y[members.of(device)]).tolist() for device in range(50)]
    assert owned[0] == [0, 1, 2, 3, 4]
    assert owned[8] == [0, 1, 2, 8, 9]
    assert {len(labels) for labels in owned} == {5}
    assert len(members.indices) == 60_000
    share_of_largest = members.sizes / members.sizes.max()
    assert np.quantile(share_of_largest, 0.8) < 0.3
    assert members.sizes.min() >= 5 * 10


def test_dirichlet_gets_more_even_with_alpha() -> None:
    y = labels_of(0, samples=5000)

    def top_share(alpha: float) -> float:
        members = partition_from({"name": "dirichlet", "devices": 20, "alpha": alpha}).divide(
            y, None, 0
        )
        tops = [np.bincount(y[members.of(d)]).max() / members.sizes[d] for d in range(20)]
        return float(np.mean(tops))

    assert top_share(0.1) > 0.6
    assert top_share(100.0) < 0.3


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "dirichlett"}, "did you mean 'dirichlet'"),
        ({}, "unknown partition '': known are: dirichlet, iid"),
        ({"name": "dirichlet", "alfa": 1}, "did you mean 'alpha'"),
        ({"name": "dirichlet", "alpha": 0}, "alpha must be above 0, got 0"),
        (
            {"name": "dirichlet", "alpha": "much"},
            "'partition.alpha' cannot be 'much': expected a number",
        ),
        (
            {"name": "dirichlet", "devices": 2.5},
            "'partition.devices' cannot be 2.5: expected a whole number",
        ),
        ({"name": "labels", "devices": 0}, "devices must be 1 or more, got 0"),
    ],
)
def test_a_wrong_table_is_refused_with_a_hint(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition_from(table)


@pytest.mark.parametrize(
    "table",
    [
        {"name": "labels", "devices": 50, "minimum": 10},
        {"name": "shards", "devices": 50},
        {"name": "dirichlet", "devices": 50},
        {"name": "iid", "devices": 50},
        {"name": "natural"},
    ],
    ids=lambda t: t["name"],
)
def test_too_few_samples_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        partition_from(table).divide(labels_of(0, samples=40), None, 0)


@settings(deadline=None)
@given(
    total=st.integers(0, 500),
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=20),
    minimum=st.integers(0, 3),
)
def test_apportion_shares_out_everything_within_one_of_the_exact_share(
    total: int, weights: list[float], minimum: int
) -> None:
    total += minimum * len(weights)
    shares = apportion(total, np.array(weights), minimum)
    exact = minimum + (total - minimum * len(weights)) * np.array(weights) / sum(weights)
    assert shares.sum() == total
    assert np.abs(shares - exact).max() < 1
    assert shares.min() >= minimum


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_hold_out_cuts_each_device_in_two(sizes: list[int], seed: int) -> None:
    members = Ownership.from_assignment(np.repeat(np.arange(len(sizes)), sizes), len(sizes))
    train, test = hold_out(members, 0.1, seed)
    for device, size in enumerate(sizes):
        both = np.concatenate([train.of(device), test.of(device)])
        assert sorted(both) == sorted(members.of(device))
        assert len(test.of(device)) == (0 if size == 1 else max(1, round(0.1 * size)))


def test_a_membership_of_a_hundred_thousand_devices_is_two_arrays() -> None:
    members = Ownership.from_assignment(np.arange(300_000) % 100_000, 100_000)
    assert members.of(99_999).tolist() == [99_999, 199_999, 299_999]
    assert members.indices.nbytes + members.sizes.nbytes < 4_000_000
