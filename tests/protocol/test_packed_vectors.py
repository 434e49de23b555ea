"""Vectors that travel in few bits: decoded as they were sent, and nothing else is accepted."""

import numpy as np
import pytest

from fedkeep.core.errors import RejectedError
from fedkeep.core.gradients.codec import Encoding, PackedVector, pack, unpack
from fedkeep.core.types import Report
from fedkeep.protocol.messages import Reported
from fedkeep.protocol.wire import from_bytes, to_bytes, unpack_vector

SIZE = 1001


def vector(encoding: Encoding) -> np.ndarray:
    numbers = np.random.default_rng(0).standard_normal(SIZE)
    return unpack(pack(numbers, encoding, seed=1), SIZE)


def sent(gradient: np.ndarray) -> bytes:
    report = Report(0, np.zeros(3, dtype=np.float32), 1.0, 1, 1, gradient, 1)
    return to_bytes(Reported(report))


@pytest.mark.parametrize(
    ("encoding", "most"), [("float16", 2.1), ("int8", 1.1), ("int4", 0.6), ("float32", 4.0)]
)
def test_a_vector_arrives_as_it_was_in_as_few_bytes(encoding: Encoding, most: float) -> None:
    gradient = vector(encoding)
    payload = sent(gradient)
    assert len(payload) <= most * SIZE + 300
    found = from_bytes(payload, Reported).report.local_gradient
    assert found.dtype == np.float32
    assert np.array_equal(found, gradient)


def test_what_is_computed_from_it_is_sent_as_it_is() -> None:
    gradient = vector("int8")
    assert isinstance(gradient, PackedVector)
    noisy = gradient + np.float32(0.001)
    found = from_bytes(sent(noisy), Reported).report.local_gradient
    assert np.array_equal(found, noisy)
    assert len(sent(noisy)) > 4 * SIZE


@pytest.mark.parametrize(
    ("numbers", "scales", "size"),
    [
        (np.zeros(SIZE, dtype=np.int8), np.zeros(15, dtype=np.float32), SIZE),
        (np.zeros(SIZE, dtype=np.int16), np.zeros(16, dtype=np.float32), SIZE),
        (np.zeros(SIZE, dtype=np.int8), np.zeros(16, dtype=np.float32), SIZE + 1),
        (np.zeros(SIZE, dtype=np.int8), np.zeros(16, dtype=np.float64), SIZE),
        (np.zeros((SIZE, 1), dtype=np.int8), np.zeros(16, dtype=np.float32), SIZE),
        (np.zeros(0, dtype=np.int8), np.zeros(0, dtype=np.float32), -1),
        (np.zeros(4, dtype=np.uint8), np.zeros(1, dtype=np.float32), 2**40),
    ],
)
def test_a_form_that_no_encoding_has_is_rejected(
    numbers: np.ndarray, scales: np.ndarray, size: int
) -> None:
    with pytest.raises(RejectedError, match="do not encode"):
        unpack_vector(numbers, scales, size)
