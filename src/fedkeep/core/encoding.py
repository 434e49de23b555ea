"""Samples in fewer bytes: one codec for stores in memory and on disk; samples are valued and trained as decoded."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from fedkeep.core.types import AnyArray, FloatArray, State

EncodingName = Literal["float32", "float16", "int8", "uint8"]
_QUANTISED = ("int8", "uint8")
_GAIN_BYTES = 1
"""Each quantised sample has a gain, a power of two, so that one beyond the range of the first is not cut off."""
_SLACK = 1.004
"""Half a level beyond the range is still within it: so a decoded sample gets the gain that it had."""
_LEAST = 1e-12
SCALE_BYTES = 8
"""What a quantising codec keeps for each feature."""


class SampleCodec:
    """Turns samples (n, ...) into rows of bytes (n, nbytes) and back into float32.

    `int8` and `uint8` round each feature to 255 or 256 levels between bounds taken from the first samples, about zero
    or about the middle of what was seen, and keep those bounds for ever. Decoding and encoding again changes nothing.

    >>> codec = SampleCodec(shape=(2,), encoding="int8")
    >>> codec.settled(np.array([[1.0, -2.0], [0.3, 0.5]])).round(4)
    array([[ 1.    , -2.    ],
           [ 0.2992,  0.5039]], dtype=float32)
    >>> codec.nbytes  # a byte for each feature, and one for the gain
    3
    """

    def __init__(self, shape: tuple[int, ...], dtype: str = "float32", encoding: EncodingName | None = None) -> None:
        if encoding is not None and encoding not in get_args(EncodingName):
            raise ValueError(f"encoding must be one of {', '.join(get_args(EncodingName))}, got {encoding}")
        self.shape, self.encoding = shape, encoding
        self.quantised = encoding in _QUANTISED
        self._dtype = np.dtype(encoding or dtype).newbyteorder("<")
        self._features = int(np.prod(shape, dtype=np.int64))
        self._scales: AnyArray | None = None
        self._levels = 127.0 if encoding == "int8" else 127.5

    @property
    def nbytes(self) -> int:
        """Of one sample."""
        return self._dtype.itemsize * self._features + (_GAIN_BYTES if self.quantised else 0)

    @property
    def ready(self) -> bool:
        return not self.quantised or self._scales is not None

    def fit(self, x: AnyArray) -> None:
        """Takes the bounds of each feature from the first samples; later calls change nothing."""
        if self.ready or not len(x):
            return
        flat = x.reshape(len(x), -1).astype(np.float64)
        low, high = flat.min(axis=0), flat.max(axis=0)
        centre = np.zeros_like(low) if self.encoding == "int8" else (low + high) / 2
        half = np.maximum(high - centre, centre - low)
        typical = float(half.max()) if half.max() > 0 else 1.0
        # A feature that has not moved yet gets the others' range rather than none.
        half = np.where(half > typical * _LEAST, half, typical)
        self._scales = np.stack([centre, half]).astype(np.float32)

    def encode(self, x: AnyArray) -> AnyArray:
        """One row of bytes per sample."""
        flat = np.ascontiguousarray(x).reshape(len(x), self._features)
        if not self.quantised:
            with np.errstate(over="ignore"):
                return np.ascontiguousarray(self._bounded(flat)).view(np.uint8).reshape(len(x), self.nbytes)
        centre, half = self._bounds()
        ratio = (flat.astype(np.float64) - centre) / half
        largest = np.abs(ratio).max(axis=1, initial=0.0) / _SLACK
        exponents = np.ceil(np.log2(np.maximum(largest, 1.0))).clip(0, 255)
        steps = ratio / 2.0 ** exponents[:, None] * self._levels
        offset = 0.0 if self.encoding == "int8" else self._levels
        rounded = np.rint(steps + offset).clip(*((-127, 127) if self.encoding == "int8" else (0, 255)))
        numbers = rounded.astype(self._dtype).view(np.uint8)
        return np.concatenate([exponents.astype(np.uint8)[:, None], numbers], axis=1)

    def decode(self, rows: AnyArray) -> AnyArray:
        """The samples of rows that `encode` made, as float32."""
        rows = np.ascontiguousarray(rows).reshape(-1, self.nbytes)
        if not self.quantised or not len(rows):
            return (
                rows[:, : self._features * self._dtype.itemsize]
                .view(self._dtype)
                .astype(np.float32)
                .reshape(-1, *self.shape)
            )
        centre, half = self._bounds()
        numbers = np.ascontiguousarray(rows[:, _GAIN_BYTES:]).view(self._dtype).astype(np.float64)
        offset = 0.0 if self.encoding == "int8" else self._levels
        gains = 2.0 ** rows[:, :_GAIN_BYTES].astype(np.float64)
        decoded = centre + (numbers - offset) / self._levels * gains * half
        return decoded.astype(np.float32).reshape(-1, *self.shape)

    def settled(self, x: AnyArray) -> AnyArray:
        """Samples as they will be once stored."""
        if self._dtype == np.float32 == x.dtype:
            return x
        self.fit(x)
        return self.decode(self.encode(x))

    def snapshot(self) -> State:
        return {} if self._scales is None else {"scales": self._scales}

    def restore(self, state: State) -> None:
        self._scales = state.get("scales")

    def _bounded(self, flat: AnyArray) -> AnyArray:
        if self.encoding == "float16":
            limit = float(np.finfo(np.float16).max)
            flat = flat.clip(-limit, limit)
        return flat.astype(self._dtype)

    def _bounds(self) -> tuple[FloatArray, FloatArray]:
        if self._scales is None:
            raise ValueError(f"a codec for {self.encoding} must see a first sample before it encodes")
        return self._scales[0].astype(np.float64), self._scales[1].astype(np.float64)
