"""Samples in fewer bytes: one codec for stores in memory and on disk.

Samples are valued and trained on as decoded.
"""

import zlib
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.types import AnyArray, FloatArray, State

EncodingName = Literal["float32", "float16", "int8", "uint8"]
_MOST_GAIN = 63
"""Each quantised sample has a gain, a power of two, so that outliers are not clipped."""
_FITS = (1, 8, 64)
"""After so many samples a store takes the bounds anew; each sample records its bounds."""
_SLACK = 1.004
"""Half a level beyond the range is still within it, so a decoded sample keeps its gain."""
_LEAST = 1e-12
SCALE_BYTES = 8 * len(_FITS)
"""What a quantising codec keeps for each feature, at most."""
_RAW_DEFLATE = -15
_LEAST_SHARE = 16
"""A sample is deflated to a sixteenth of its bytes at the least: even noise keeps its shape."""


class SampleCodec:
    """Turns samples (n, ...) into rows of at most `nbytes` bytes each, and back into float32.

    `int8` and `uint8` round each feature to 255 or 256 levels between bounds taken from the first
    samples, about zero or about the middle of what was seen, and keep those bounds for ever.
    Decoding and encoding again changes nothing.

    With `deflate_to`, rows are deflated, which loses nothing. A row that is still longer has its
    numbers rounded as coarsely as it takes to fit.

    >>> codec = SampleCodec(shape=(2,), encoding="int8")
    >>> codec.settled(np.array([[1.0, -2.0], [0.3, 0.5]])).round(4)
    array([[ 1.    , -2.    ],
           [ 0.2992,  0.5039]], dtype=float32)
    >>> codec.nbytes  # a byte for each feature, and one for the gain
    3
    >>> small = SampleCodec(shape=(784,), deflate_to=500)
    >>> rows = small.encode(np.repeat([[0.1, 0.2], [0.3, 0.1]], 392, axis=1))
    >>> [len(row) < 60 for row in rows], small.coarsened
    ([True, True], 0)
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str = "float32",
        encoding: EncodingName | None = None,
        deflate_to: int | None = None,
    ) -> None:
        if encoding is not None and encoding not in get_args(EncodingName):
            raise ValueError(
                f"encoding must be one of {', '.join(get_args(EncodingName))}, got {encoding}"
            )
        self.shape, self.encoding = shape, encoding
        self.quantised = encoding in ("int8", "uint8")
        self._dtype = np.dtype(encoding or dtype).newbyteorder("<")
        self._features = int(np.prod(shape, dtype=np.int64))
        self._levels, self._offset = (127.0, 0.0) if encoding == "int8" else (127.5, 127.5)
        self._head = 1 if self.quantised else 0
        """Bytes before the numbers: the gain, and which bounds they were rounded by."""
        self._scales: list[AnyArray] = []
        self._range: list[FloatArray] = []
        self._seen = 0
        self.plain_bytes = self._dtype.itemsize * self._features + self._head
        """Of one sample before it is deflated."""
        least = 32 + self.plain_bytes // _LEAST_SHARE
        if deflate_to is not None and not least <= deflate_to < self.plain_bytes:
            raise ConfigError(
                f"deflate_to must be from {least} to below the {self.plain_bytes} bytes "
                f"of a sample, got {deflate_to}"
            )
        self._limit = deflate_to
        self.nbytes = self.plain_bytes if deflate_to is None else deflate_to
        """Of one sample, at most."""
        self.coarsened = 0
        """How many samples were rounded because they did not fit otherwise."""

    @property
    def ready(self) -> bool:
        """Whether the bounds of each feature are known, where they are needed."""
        return not self.quantised or bool(self._scales)

    def fit(self, x: AnyArray) -> None:
        """Take the bounds of each feature from the first samples; later calls change nothing."""
        if not self.ready and len(x):
            self.learn(x)
            self._seen = _FITS[-1]

    def learn(self, x: AnyArray) -> bool:
        """Take the bounds of each feature from the first samples, again while they are few.

        Returns
        -------
        bool
            Whether the bounds were taken.
        """
        before = self._seen
        if not self.quantised or before >= _FITS[-1] or not len(x):
            return False
        flat = x.reshape(len(x), -1).astype(np.float64)
        ranges = np.stack([flat.min(axis=0), flat.max(axis=0), *self._range])
        self._range = [low, high] = [ranges.min(axis=0), ranges.max(axis=0)]
        self._seen += len(x)
        if not any(before < at <= self._seen for at in _FITS):
            return False
        centre = np.zeros_like(low) if self.encoding == "int8" else (low + high) / 2
        half = np.maximum(high - centre, centre - low)
        typical = float(half.max()) if half.max() > 0 else 1.0
        # A feature that has not moved yet gets the others' range rather than none.
        half = np.where(half > typical * _LEAST, half, typical)
        self._scales.append(np.stack([centre, half]).astype(np.float32))
        return True

    def encode(self, x: AnyArray) -> list[bytes]:
        """One row of bytes per sample."""
        flat = np.ascontiguousarray(x).reshape(len(x), self._features)
        if self.quantised:
            plain = self._quantise(flat.astype(np.float64))
        else:
            if self.encoding == "float16":
                most = float(np.finfo(np.float16).max)
                flat = flat.clip(-most, most)
            with np.errstate(over="ignore"):
                plain = flat.astype(self._dtype)
        return [self.packed(row.tobytes()) for row in plain]

    def decode(self, rows: Sequence[bytes]) -> AnyArray:
        """Return the samples of rows that `encode` made, as float32."""
        joined = np.frombuffer(b"".join(self.unpacked(row) for row in rows), np.uint8)
        plain = joined.reshape(-1, self.plain_bytes)
        numbers = np.ascontiguousarray(plain[:, self._head :]).view(self._dtype)
        decoded = numbers.astype(np.float32)
        if self.quantised:
            gains = 2.0 ** (plain[:, :1] & _MOST_GAIN).astype(np.float64)
            versions = plain[:, 0] >> 6
            for version in np.unique(versions).tolist():
                own = versions == version
                centre, half = self._scale(version)
                ratio = (numbers[own].astype(np.float64) - self._offset) / self._levels
                decoded[own] = centre + ratio * gains[own] * half
        return decoded.reshape(-1, *self.shape)

    def settled(self, x: AnyArray) -> AnyArray:
        """Return samples as they will be once stored."""
        if self.is_plain(x):
            return x
        self.fit(x)
        return self.decode(self.encode(x))

    def is_plain(self, x: AnyArray) -> bool:
        """Whether these samples are kept as they are."""
        return self._limit is None and bool(self._dtype == np.float32 == x.dtype)

    def packed(self, row: bytes) -> bytes:
        """Return a plain row as it is stored: deflated byte by byte, where there is a limit."""
        if self._limit is None:
            return row
        whole = self._deflated(row)
        if len(whole) <= self._limit:
            return whole
        self.coarsened += 1
        head = row[: self._head]
        numbers = np.frombuffer(row, self._dtype, offset=self._head)
        low, high = 0, _coarsest(self._dtype)
        found = self._deflated(head + _rounded(numbers, high).tobytes())
        while low + 1 < high:
            middle = (low + high) // 2
            tried = self._deflated(head + _rounded(numbers, middle).tobytes())
            if len(tried) <= self._limit:
                high, found = middle, tried
            else:
                low = middle
        return found

    def unpacked(self, row: bytes) -> bytes:
        """Return the plain row of a stored one."""
        if self._limit is None:
            return row
        planes = zlib.decompressobj(_RAW_DEFLATE).decompress(row, self.plain_bytes)
        numbers = np.frombuffer(planes, np.uint8, offset=self._head).reshape(
            self._dtype.itemsize, -1
        )
        return planes[: self._head] + numbers.T.tobytes()

    def deflated_sizes(self, rows: Sequence[bytes]) -> list[int]:
        """How many bytes each of these rows takes when it is deflated without loss."""
        return [len(self._deflated(self.unpacked(row))) for row in rows]

    def _deflated(self, row: bytes) -> bytes:
        numbers = np.frombuffer(row, np.uint8, offset=self._head).reshape(-1, self._dtype.itemsize)
        return zlib.compress(row[: self._head] + numbers.T.tobytes(), wbits=_RAW_DEFLATE)

    def _quantise(self, flat: FloatArray) -> AnyArray:
        """Rows of a gain, with the number of its bounds, and levels."""
        centre, half = self._scale(-1)
        ratio = (flat - centre) / half
        largest = np.abs(ratio).max(axis=1, initial=0.0) / _SLACK
        exponents = np.ceil(np.log2(np.maximum(largest, 1.0))).clip(0, _MOST_GAIN)
        steps = ratio / 2.0 ** exponents[:, None] * self._levels
        rounded = np.rint(steps + self._offset).clip(
            *((-127, 127) if self.encoding == "int8" else (0, 255))
        )
        numbers = rounded.astype(self._dtype).view(np.uint8)
        heads = exponents.astype(np.uint8) | (len(self._scales) - 1 << 6)
        return np.concatenate([heads[:, None], numbers], axis=1)

    def snapshot(self) -> State:
        """Return the bounds and how many samples they were taken from."""
        return (
            {"scales": np.stack(self._scales), "seen": np.array(self._seen)} if self._scales else {}
        )

    def restore(self, state: State) -> None:
        """Take over the bounds of a snapshot."""
        self._scales = list(state.get("scales", ()))
        self._seen = int(state.get("seen", _FITS[-1])) if self._scales else 0
        self._range = []
        if self._scales:
            centre, half = self._scale(-1)
            self._range = [centre - half, centre + half]

    def _scale(self, version: int) -> tuple[FloatArray, FloatArray]:
        if not self._scales:
            raise ValueError(
                f"a codec for {self.encoding} must see a first sample before it encodes"
            )
        centre, half = self._scales[version].astype(np.float64)
        return centre, half


def _coarsest(dtype: np.dtype[np.generic]) -> int:
    """Return the rounding that leaves nothing of a sample that takes bytes."""
    return np.finfo(dtype.str).nmant + 3 if dtype.kind == "f" else 8 * dtype.itemsize + 1


def _rounded(numbers: AnyArray, bits: int) -> AnyArray:
    """Round off the lowest bits: all numbers by one step, floats relative to the largest.

    >>> _rounded(np.array([3, -100, 127], dtype=np.int8), 4).tolist()
    [0, -96, 127]
    >>> _rounded(np.array([0.7, -100, 127], dtype=np.float32), 20).tolist()
    [0.0, -96.0, 128.0]
    """
    if bits == _coarsest(numbers.dtype):
        return np.full_like(numbers, 0 if numbers.dtype.kind == "f" else int(np.median(numbers)))
    if numbers.dtype.kind == "f":
        form = np.finfo(numbers.dtype.str)
        largest = np.frexp(np.abs(numbers.astype(np.float64)).max())[1]
        step = np.ldexp(1.0, int(largest) - 1 - form.nmant + bits)
        rounded, low, high = np.rint(numbers / step) * step, float(form.min), float(form.max)
    else:
        rounded = (numbers.astype(np.int64) + (1 << bits - 1)) >> bits << bits
        low, high = np.iinfo(numbers.dtype.str).min, np.iinfo(numbers.dtype.str).max
    return np.asarray(rounded.clip(low, high), numbers.dtype)
