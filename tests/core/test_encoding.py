"""Fewer bytes per sample: how far a decoded sample may be off; decoding twice changes nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import ConfigError
from fedkeep.encoding import SampleCodec


def test_by_hand() -> None:
    codec = SampleCodec((2,), encoding="int8")
    codec.fit(np.array([[1.27, -2.0], [0.5, 12.7]]))
    rows = codec.encode(np.array([[1.27, 0.0], [0.01, -12.7], [2.54, 0.0]]))
    assert [np.frombuffer(row, np.int8).tolist() for row in rows] == [
        [0, 127, 0],
        [0, 1, -127],
        [1, 127, 0],
    ]
    np.testing.assert_allclose(
        codec.decode(rows), [[1.27, 0.0], [0.01, -12.7], [2.54, 0.0]], atol=1e-6
    )
    bytes_ = SampleCodec((1,), encoding="uint8")
    bytes_.fit(np.array([[0.0], [255.0]]))
    np.testing.assert_array_equal(bytes_.settled(np.arange(256.0)[:, None])[:, 0], np.arange(256.0))


@pytest.mark.parametrize(
    ("encoding", "nbytes"), [("float32", 24), ("float16", 12), ("int8", 7), ("uint8", 7)]
)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-6, 1e6))
@settings(max_examples=40, deadline=None)
def test_what_was_decoded_stays_as_it_is(
    encoding: str, nbytes: int, seed: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((9, 2, 3)) * scale).astype(np.float32)
    codec = SampleCodec((2, 3), encoding=encoding)  # type: ignore[arg-type]
    codec.fit(x[:3])
    once = codec.settled(x)
    assert {codec.nbytes, *map(len, codec.encode(x))} == {nbytes}
    np.testing.assert_array_equal(codec.settled(once), once)
    np.testing.assert_array_equal(
        codec.decode(codec.encode(x[4:5])), once[4:5], err_msg="alone or with others"
    )
    again = SampleCodec((2, 3), encoding=encoding)  # type: ignore[arg-type]
    again.restore(codec.snapshot())
    np.testing.assert_array_equal(again.settled(x), once)
    if codec.quantised:
        centre, half = (codec.snapshot()["scales"][-1][i].reshape(2, 3) for i in (0, 1))
        gains = 2 ** np.ceil(np.log2(np.maximum(np.abs((x - centre) / half).max(axis=(1, 2)), 1)))
        assert (np.abs(once - x) <= 0.51 / 127 * half * gains[:, None, None]).all()


def test_a_feature_that_has_not_moved_yet_has_a_range_all_the_same() -> None:
    codec = SampleCodec((2,), encoding="uint8")
    codec.fit(np.array([[3.0, 7.0], [5.0, 7.0]]))
    np.testing.assert_allclose(codec.settled(np.array([[4.0, 7.5]])), [[4.0, 7.5]], atol=0.02)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int16"])
def test_what_deflates_within_the_limit_loses_nothing(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.integers(0, 12, (20, 200)) * (rng.random((20, 200)) < 0.3)).astype(dtype)
    codec = SampleCodec((200,), dtype, deflate_to=190)
    rows = codec.encode(x)
    assert max(map(len, rows)) <= codec.nbytes == 190
    np.testing.assert_array_equal(codec.decode(rows), x)
    assert codec.coarsened == 0
    assert [codec.packed(codec.unpacked(row)) for row in rows] == rows


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8", "uint8"])
@given(seed=st.integers(0, 2**31), limit=st.integers(0, 100), scale=st.floats(1e-30, 1e4))
@settings(max_examples=40, deadline=None)
def test_noise_is_rounded_until_it_fits_and_no_further_than_it_must(
    encoding: str, seed: int, limit: int, scale: float
) -> None:
    x = (np.random.default_rng(seed).standard_normal((4, 300)) * scale).astype(np.float32)
    plain = SampleCodec((300,), encoding=encoding)  # type: ignore[arg-type]
    limit = plain.nbytes // 16 + 32 + limit * plain.nbytes // 140
    codec = SampleCodec((300,), encoding=encoding, deflate_to=limit)  # type: ignore[arg-type]
    plain.fit(x)
    codec.restore(plain.snapshot())
    rows, off = codec.encode(x), np.abs(codec.settled(x) - plain.settled(x)).max()
    assert max(map(len, rows)) <= limit
    assert off <= 2.002 * np.abs(x).max()  # no farther than a feature's whole range
    if limit > 0.75 * plain.nbytes:
        assert off <= np.abs(x).max() / 8


def test_a_limit_that_nothing_fits_or_that_saves_nothing_is_refused() -> None:
    for limit in (10, 400):
        with pytest.raises(ConfigError, match="deflate_to must be from 57 to below the 400 bytes"):
            SampleCodec((100,), deflate_to=limit)


def test_a_store_learns_bounds_from_more_than_its_very_first_sample() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 50)).astype(np.float32)
    codec = SampleCodec((50,), encoding="int8")
    assert [codec.learn(one[None]) for one in x].count(True) == 3
    rows = codec.encode(x)
    assert np.abs(codec.decode(rows) - x).max() < 0.05
    early = SampleCodec((50,), encoding="int8")
    kept = [early.encode(one[None])[0] for one in x if early.learn(one[None]) or True]
    again = SampleCodec((50,), encoding="int8")
    again.restore(early.snapshot())
    np.testing.assert_array_equal(again.decode(kept), early.decode(kept))
    assert np.abs(again.decode(kept[8:]) - x[8:]).max() < 0.3
    assert not again.learn(x)
