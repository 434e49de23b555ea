"""The window: the sum of all arrivals, in full precision or in two bytes a number."""

from dataclasses import replace

import numpy as np
import pytest

from fedkeep.core.device import Device
from fedkeep.core.gist import GistOptions
from fedkeep.core.gradients import GradientAccumulator
from fedkeep.core.gradients.layout import sketched_layout
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.types import Batch, LocalTraining, TrainOrder
from fedkeep.learn.dense_learner import DenseLearner

LEARNER = DenseLearner((40, 30, 4))
PROBE = LEARNER.probe(LEARNER.initial(0))


def arrivals(n: int, seed: int = 0, scale: float = 1.0) -> Batch:
    rng = np.random.default_rng(seed)
    x = (scale * rng.standard_normal((n, 40))).astype(np.float32)
    return Batch(x, rng.integers(0, 4, n), 1000 * seed + np.arange(n))


def measured(batch: Batch) -> PerSampleGradients:
    found: PerSampleGradients = PROBE.measure(batch)
    return found


def window(rank: int | None, encoding: str, seed: int = 0) -> GradientAccumulator:
    if rank is None:
        return GradientAccumulator(
            LEARNER.gradient_size,
            4,
            encoding=encoding,  # type: ignore[arg-type]
            seed=seed,
        )
    layout = sketched_layout(LEARNER.gradient_shapes(None), rank)
    assert not layout.whole
    return GradientAccumulator(
        layout.size,
        4,
        layout=layout,
        encoding=encoding,  # type: ignore[arg-type]
        seed=seed,
    )


def apart(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("chunk", [1, 7, 400])
def test_two_bytes_a_number_are_near_the_sum_however_the_arrivals_come(
    rank: int | None, chunk: int
) -> None:
    batch = arrivals(400)
    exact, short = window(rank, "float32"), window(rank, "int16")
    exact.add(measured(batch), batch.y)
    for start in range(0, 400, chunk):
        part = batch.take(np.arange(start, min(start + chunk, 400)))
        short.add(measured(part), part.y)
    assert short.counts.tolist() == exact.counts.tolist()
    assert apart(short.mean(), exact.mean()) < 3e-3
    numbers = short.size
    assert short.nbytes == 2 * numbers + 4 * -(-numbers // 256) + short.counts.nbytes
    short.clear()
    assert not short.mean().any()
    assert short.count == 0


def test_many_small_gradients_are_not_lost_beside_a_large_one() -> None:
    """Each adds less than a level: rounded to the nearest, all of them would be lost."""
    large, small = arrivals(1, scale=300.0), arrivals(1, seed=1, scale=1e-3)
    exact, short = window(3, "float32"), window(3, "int16")
    for one in (exact, short):
        one.add(measured(large), large.y)
    before = exact.mean() * exact.count
    for _ in range(3000):
        for one in (exact, short):
            one.add(measured(small), small.y)
    added, found = (one.mean() * one.count - before for one in (exact, short))
    # What 3,000 of them add up to, by the direction that it has.
    assert found @ added / (added @ added) == pytest.approx(1, abs=0.1)


def test_a_restart_in_the_middle_changes_nothing() -> None:
    straight, first = window(3, "int16", seed=5), window(3, "int16", seed=5)
    parts = [arrivals(9, seed) for seed in range(4)]
    for part in parts:
        straight.add(measured(part), part.y)
    for part in parts[:2]:
        first.add(measured(part), part.y)
    second = window(3, "int16", seed=5)
    state = first.snapshot()
    assert {name: (spec.shape, spec.dtype) for name, spec in second.state_spec().items()} == {
        name: (array.shape, array.dtype) for name, array in state.items()
    }
    second.restore(state)
    for part in parts[2:]:
        second.add(measured(part), part.y)
    assert second.mean().tolist() == straight.mean().tolist()


@pytest.mark.parametrize("rank", [None, 3])
def test_an_endless_gradient_costs_one_window_and_no_more(rank: int | None) -> None:
    options = GistOptions("local", rank=rank, encoding="int8")
    device = Device(
        LEARNER, BalancedReservoir(), capacity=4, sample_shape=(40,), labels=4, gist=options
    )
    device.set_model(LEARNER.initial(0))
    endless = np.full((1, 40), np.inf, dtype=np.float32)
    for round_ in range(4):
        device.observe(arrivals(12, seed=round_ + 1), float(round_))
        if round_ == 1:
            huge = replace(arrivals(1, seed=50), x=endless)
            with np.errstate(all="ignore"):
                device.window.add(measured(huge), huge.y)
            assert not np.isfinite(device.window.mean()).all()
        model = LEARNER.initial(0) + np.float32(0.01 * round_) * LEARNER.initial(1)
        report = device.participate(TrainOrder(round_, model, None, LocalTraining(0.1, 2)))
        assert np.isfinite(report.model).all()
    assert device.gist is not None
    assert device.gist.ess > 4
