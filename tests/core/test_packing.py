"""Vectors in fewer bytes."""

from __future__ import annotations

import numpy as np
import pytest

from fedkeep.core.packing import Encoding, Packed, pack


@pytest.mark.parametrize(
    ("encoding", "error", "size"), [("float32", 1e-7, 4.0), ("float16", 1e-3, 2.07), ("int8", 0.02, 1.07)]
)
def test_a_packed_vector_is_near_the_one_it_stands_for(encoding: Encoding, error: float, size: float) -> None:
    vector = np.random.default_rng(0).standard_normal(1000) * 1e6
    packed = pack(vector, encoding, seed=1)
    assert np.linalg.norm(packed.unpack() - vector) <= error * np.linalg.norm(vector)
    assert packed.nbytes <= size * len(vector)
    again = Packed.from_snapshot(packed.snapshot(), encoding)
    np.testing.assert_array_equal(again.unpack(), packed.unpack())


def test_random_rounding_loses_nothing_on_average() -> None:
    vector = np.array([1.0, 0.1234, -0.3017, 0.0])
    mean = np.mean([pack(vector, "int8", seed).unpack() for seed in range(4000)], axis=0)
    np.testing.assert_allclose(mean, vector, atol=4e-4)
