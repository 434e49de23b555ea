"""The share of wrong labels, estimated on data whose wrong labels are known."""

from collections.abc import Callable

import numpy as np
import pytest

from fedkeep.advice.noise import wrong_labels


def clusters(rng: np.random.Generator, y: np.ndarray) -> np.ndarray:
    return np.eye(5, 12)[y] * 5 + rng.normal(size=(len(y), 12))


def rings(rng: np.random.Generator, y: np.ndarray) -> np.ndarray:
    angle = rng.uniform(0, 2 * np.pi, len(y))
    points = (1 + 2 * y)[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points + rng.normal(0, 0.2, points.shape)


@pytest.mark.parametrize("make", [clusters, rings])
@pytest.mark.parametrize("share", [0.0, 0.0375, 0.1, 0.225, 0.375, 0.4])
def test_the_true_share_lies_in_or_near_the_interval(
    make: Callable[[np.random.Generator, np.ndarray], np.ndarray], share: float
) -> None:
    rng = np.random.default_rng(3)
    y = rng.integers(0, 5, 1500)
    x = make(rng, y)
    wrong = rng.random(len(y)) < share
    given = np.where(wrong, (y + rng.integers(1, 5, len(y))) % 5, y)
    found = wrong_labels(x, given, rng)
    true = float(wrong.mean())
    assert found.low - 0.01 <= true <= found.high + 0.01
    assert found.share == pytest.approx(true, abs=0.025)
    assert found.high - found.low <= 0.08


def test_too_few_samples_give_no_estimate() -> None:
    rng = np.random.default_rng(0)
    found = wrong_labels(np.zeros((5, 2)), np.array([0, 1, 0, 1, 0]), rng)
    assert (found.low, found.high) == (0.0, 1.0)
