"""Targets that are numbers: their form and regions, and how store and device hold them."""

import numpy as np
import pytest

from fedkeep.core.device import Device
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.policies.fifo import Fifo
from fedkeep.core.regions import LabelRegions, TargetRegions, regions_for
from fedkeep.core.screening import screen_samples
from fedkeep.core.store import MemoryStore
from fedkeep.core.targets import LARGEST_TARGET, NumberTargets, quantile_edges
from fedkeep.core.types import AnyArray, Batch
from fedkeep.learn.dense_learner import DenseLearner


def batch_of(y: AnyArray | list[float]) -> Batch:
    y = np.asarray(y, dtype=np.float64)
    x = np.arange(2 * len(y), dtype=np.float32).reshape(len(y), 2)
    return Batch(x, y, np.arange(len(y)))


def test_an_edge_belongs_to_the_region_above_it() -> None:
    targets = NumberTargets((0.0, 10.0))
    assert targets.assign(np.array([-1.0, 0.0, 9.99, 10.0, 1e9])).tolist() == [0, 1, 1, 2, 2]
    assert targets.names == ("below 0", "0 to 10", "10 and more")
    assert NumberTargets().assign(np.zeros((3, 2))).tolist() == [0, 0, 0]
    assert NumberTargets().names == ("all",)


@pytest.mark.parametrize("edges", [(1.0, 1.0), (2.0, 1.0), (float("nan"),), (float("inf"),)])
def test_edges_that_do_not_ascend_are_refused(edges: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="edges must be finite and ascend"):
        NumberTargets(edges)


def test_several_numbers_have_no_edges_and_at_least_one() -> None:
    with pytest.raises(ValueError, match="edges divide one number"):
        NumberTargets((1.0,), width=2)
    with pytest.raises(ValueError, match="width"):
        NumberTargets(width=0)


def test_quantile_edges_divide_evenly_and_once() -> None:
    y = np.arange(1.0, 101.0)
    edges = quantile_edges(y, 4)
    assert np.bincount(NumberTargets(edges).assign(y)).tolist() == [25, 25, 25, 25]
    assert quantile_edges(np.full(9, 5.0), 4) == ()


def test_samples_with_numbers_that_are_none_are_rejected() -> None:
    x = np.zeros((6, 2), dtype=np.float32)
    x[5, 0] = np.nan
    y = np.array([1.5, np.nan, np.inf, -3.0, 10 * LARGEST_TARGET, 2.0])
    valid, rejected = screen_samples(x, y, (2,), 1, NumberTargets())
    assert valid.tolist() == [True, False, False, True, False, False]
    assert rejected == {"label": 3, "not-finite": 1}
    wide, _ = screen_samples(
        x[:2], np.array([[1.0, 2.0], [3.0, np.nan]]), (2,), 1, NumberTargets(width=2)
    )
    assert wide.tolist() == [True, False]
    assert not screen_samples(x[:2], np.array([1.0, 2.0]), (2,), 1, NumberTargets(width=2))[0].any()
    assert not screen_samples(x[:2], np.array(["1", "2"]), (2,), 1, NumberTargets())[0].any()


def test_regions_are_intervals_where_slots_are_divided_and_one_elsewhere() -> None:
    targets = NumberTargets((5.0,))
    assert regions_for(BalancedReservoir(), 2, targets) == TargetRegions(targets)
    assert regions_for(Fifo(), 2, targets) == LabelRegions(1)
    assert TargetRegions(targets).assign(batch_of([4.0, 5.0]), None).tolist() == [0, 1]


@pytest.mark.parametrize("many", [1, 20])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_store_keeps_numbers_as_they_came(many: int, shape: tuple[int, ...]) -> None:
    y = np.random.default_rng(0).normal(size=(many, *shape))
    store = MemoryStore(np.array([8]))
    came = batch_of(y)
    store.offer(came, np.zeros(many, dtype=np.int64), np.arange(float(many)), came.ids)
    kept = store.stored().batch
    assert kept.y.dtype == np.float64
    assert np.array_equal(kept.y, y[kept.ids])
    again = MemoryStore(np.array([8]))
    again.restore(store.snapshot())
    assert np.array_equal(again.stored().batch.y, kept.y)
    y += 1.0  # what the caller does with its arrays afterwards is no matter of the store's
    assert np.array_equal(store.stored().batch.y, kept.y)


def test_an_empty_store_has_the_targets_form_once_some_have_come() -> None:
    store = MemoryStore(np.array([2]))
    assert store.stored().batch.y.dtype == np.int64
    came = batch_of(np.zeros((1, 3)))
    store.offer(came, np.zeros(1, dtype=np.int64), np.array([-np.inf]), came.ids)
    assert store.stored().batch.y.shape == (0, 3)


def test_a_device_divides_its_slots_among_intervals() -> None:
    learner = DenseLearner((2, 2))
    device = Device(
        learner, BalancedReservoir(), capacity=4, sample_shape=(2,), labels=2,
        targets=NumberTargets((10.0,)),
    )  # fmt: skip
    y = np.array([1, 2, 3, 4, 5, 6, 7, 8, 90, 91])
    x = np.ones((10, 2), dtype=np.float32)
    outcome, rejected = device.observe(Batch(x, y, np.arange(10)), time=1.0)
    stored = device.store.stored()
    assert not rejected
    assert len(outcome.results) == 10
    assert stored.batch.y.dtype == np.float64
    assert stored.regions.tolist() == (stored.batch.y >= 10).astype(int).tolist()
    assert 0 < stored.regions.sum() < 4
    assert device.meter.velocity().tolist() == [8.0, 2.0]
