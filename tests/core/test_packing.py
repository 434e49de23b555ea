"""Vectors in fewer bytes."""

import numpy as np
import pytest

from fedkeep.core.gist import Encoding, pack, packed_bytes, unpack
from fedkeep.core.types import State


def nbytes(packed: State) -> int:
    return sum(array.nbytes for array in packed.values())


@pytest.mark.parametrize(
    ("encoding", "error", "size"),
    [("float32", 1e-7, 4.0), ("float16", 1e-3, 2.07), ("int8", 0.02, 1.07), ("int4", 0.2, 0.57)],
)
def test_a_packed_vector_is_near_the_one_it_stands_for(
    encoding: Encoding, error: float, size: float
) -> None:
    vector = np.random.default_rng(0).standard_normal(1000) * 1e6
    packed = pack(vector, encoding, seed=1)
    assert np.linalg.norm(unpack(packed, len(vector)) - vector) <= error * np.linalg.norm(vector)
    assert nbytes(packed) == packed_bytes(len(vector), encoding) <= size * len(vector)


def test_random_rounding_loses_nothing_on_average() -> None:
    vector = np.array([1.0, 0.1234, -0.3017, 0.0])
    mean = np.mean(
        [unpack(pack(vector, "int8", seed), len(vector)) for seed in range(4000)], axis=0
    )
    np.testing.assert_allclose(mean, vector, atol=4e-4)
