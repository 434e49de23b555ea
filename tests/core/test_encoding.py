"""Fewer bytes per sample: how far a decoded sample may be off, and that decoding twice changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.encoding import SampleCodec


def test_by_hand() -> None:
    codec = SampleCodec((2,), encoding="int8")
    codec.fit(np.array([[1.27, -2.0], [0.5, 12.7]]))
    rows = codec.encode(np.array([[1.27, 0.0], [0.01, -12.7], [2.54, 0.0]]))
    assert rows.view(np.int8).tolist() == [[0, 127, 0], [0, 1, -127], [1, 127, 0]]
    np.testing.assert_allclose(codec.decode(rows), [[1.27, 0.0], [0.01, -12.7], [2.54, 0.0]], atol=1e-6)
    bytes_ = SampleCodec((1,), encoding="uint8")
    bytes_.fit(np.array([[0.0], [255.0]]))
    np.testing.assert_array_equal(bytes_.settled(np.arange(256.0)[:, None])[:, 0], np.arange(256.0))


@pytest.mark.parametrize(("encoding", "nbytes"), [("float32", 24), ("float16", 12), ("int8", 7), ("uint8", 7)])
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-6, 1e6))
@settings(max_examples=40, deadline=None)
def test_what_was_decoded_stays_as_it_is(encoding: str, nbytes: int, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((9, 2, 3)) * scale).astype(np.float32)
    codec = SampleCodec((2, 3), encoding=encoding)  # type: ignore[arg-type]
    codec.fit(x[:3])
    once = codec.settled(x)
    assert codec.nbytes == nbytes == codec.encode(x).shape[1]
    np.testing.assert_array_equal(codec.settled(once), once)
    np.testing.assert_array_equal(codec.decode(codec.encode(x[4:5])), once[4:5], err_msg="alone or with others")
    again = SampleCodec((2, 3), encoding=encoding)  # type: ignore[arg-type]
    again.restore(codec.snapshot())
    np.testing.assert_array_equal(again.settled(x), once)
    if codec.quantised:
        centre, half = (codec.snapshot()["scales"][i].reshape(2, 3) for i in (0, 1))
        gains = 2 ** np.ceil(np.log2(np.maximum(np.abs((x - centre) / half).max(axis=(1, 2)), 1)))
        assert (np.abs(once - x) <= 0.51 / 127 * half * gains[:, None, None]).all()


def test_a_feature_that_has_not_moved_yet_has_a_range_all_the_same() -> None:
    codec = SampleCodec((2,), encoding="uint8")
    codec.fit(np.array([[3.0, 7.0], [5.0, 7.0]]))
    np.testing.assert_allclose(codec.settled(np.array([[4.0, 7.5]])), [[4.0, 7.5]], atol=0.02)
