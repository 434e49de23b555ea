"""LEAF's generator, against figures and digests of LEAF's own program."""

from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from fedkeep.data import TASKS, Federation
from fedkeep.data.synthetic import Demo, Synthetic

STOCK = {"smallest": 5, "largest": 1000}


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, 1_016_441),
        ({"generator_seed": 931231}, 1_022_832),
        ({"generator_seed": 931231, **STOCK}, 23_807),
    ],
)
def test_sizes_are_leafs(options: dict[str, Any], samples: int) -> None:
    sizes = Synthetic(**options).sizes()
    assert len(sizes) == 200
    assert sizes.sum() == samples


@pytest.mark.parametrize(
    ("seed", "clusters", "digest"), [(42, 1, "609a1bf52509e463"), (931231, 2, "2a8a1d05ba9cfd28")]
)
def test_labels_are_leafs_to_the_last_one(seed: int, clusters: int, digest: str) -> None:
    fleet = Synthetic(generator_seed=seed, clusters=clusters, **STOCK).load(seed=0)
    assert sha256(fleet.y.astype(np.uint8).tobytes()).hexdigest().startswith(digest)


def test_features_are_leafs() -> None:
    x = Synthetic(generator_seed=42, **STOCK).load(seed=0).x
    np.testing.assert_allclose(x[0, :3], [3.35186719, 0.52740737, -0.45874829], rtol=1e-6)
    np.testing.assert_allclose(x[-1, :3], [-2.89427202, -0.10443775, -2.07629952], rtol=1e-6)
    assert x.dtype == np.float32


def test_each_device_is_split_nine_to_one() -> None:
    fleet = Synthetic(smallest=200, largest=300).load(seed=0)
    assert np.abs(fleet.test.sizes / (fleet.train.sizes + fleet.test.sizes) - 0.1).max() < 0.005


def test_leafs_own_spread_is_concentrated_and_a_wide_one_shows_all_labels() -> None:
    def labels_seen(spread: float) -> tuple[float, float]:
        counts = Synthetic(smallest=500, largest=600, spread=spread).load(seed=0).label_counts
        return float(np.median((counts > 0).sum(axis=1))), float(
            np.median(counts.max(axis=1) / counts.sum(axis=1))
        )

    labels, top_share = labels_seen(1.0)
    assert labels <= 3
    assert top_share > 0.9
    labels, top_share = labels_seen(8.0)
    assert labels == 10
    assert top_share < 0.4


def test_a_fleet_of_five_thousand_devices_is_made_and_indexed() -> None:
    fleet = Synthetic(devices=5_000, smallest=5, largest=8, features=4, labels=3).load(seed=0)
    assert fleet.devices == 5_000
    assert fleet.train.sizes.min() >= 4
    assert len(fleet.train_batch(4_999)) == fleet.train.sizes[4_999]


def test_the_embedded_task_is_small_and_shows_all_labels_almost_everywhere() -> None:
    fleet = TASKS["demo"]().load(seed=0)
    assert isinstance(Demo(), Synthetic)
    assert len(fleet.y) < 30_000
    assert np.median((fleet.label_counts > 0).sum(axis=1)) == 10
    assert fleet.model.name == "softmax"


@pytest.mark.parametrize(
    "options",
    [{"devices": 0}, {"largest": 10}, {"spread": 0.0}, {"test_fraction": 1.0}, {"clusters": 0}],
    ids=str,
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Synthetic(**options)


def test_dealt_samples_change_devices_and_nothing_else() -> None:
    own, half, even = (
        Synthetic(devices=30, smallest=300, largest=400, mixed=mixed).load(seed=0)
        for mixed in (0.0, 0.5, 1.0)
    )
    for dealt in (half, even):
        np.testing.assert_array_equal(dealt.x, own.x)
        np.testing.assert_array_equal(dealt.y, own.y)
        np.testing.assert_array_equal(dealt.train.sizes, own.train.sizes)
        used = np.concatenate([dealt.train.indices, dealt.test.indices])
        np.testing.assert_array_equal(np.sort(used), np.arange(len(own.y)))

    def top(fleet: Federation) -> float:
        return float((fleet.label_counts.max(axis=1) / fleet.label_counts.sum(axis=1)).mean())

    assert top(own) > 0.8 > top(half) > 0.45 > top(even)
    assert ((even.label_counts > 0).sum(axis=1) >= 9).all()
