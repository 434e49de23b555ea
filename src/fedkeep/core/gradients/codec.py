"""How gists and sums are kept in few bytes: half precision, or whole numbers with scales.

Whole numbers are rounded at random, up or down with odds by the distance: on average nothing is
lost, and what one participation loses does not add up over the next ones, since each takes only a
part of m over.
"""

from typing import Literal, TypeAlias

import numpy as np

from fedkeep.core.seeds import uniform_keys
from fedkeep.core.types import AnyArray, FloatArray, State, Vector

Encoding: TypeAlias = Literal["float32", "float16", "int8", "int4"]
"""In which numbers a gist is kept."""
SumEncoding: TypeAlias = Encoding | Literal["int16"]
"""In which numbers a sum is kept: each addition rounds it, so that it needs more bits than m."""
BLOCK = 64
"""Numbers that share a scale in the shorter encodings."""
_BLOCK_OF_SUMS = 256
"""The same in `int16`, which has bits to spare."""


class PackedVector(np.ndarray[tuple[int], np.dtype[np.float32]]):
    """A decoded vector that still knows its encoding, so that it can be sent in as few bytes.

    Whatever is computed from it is a plain vector.
    """

    packed: State | None = None

    def __array_finalize__(self, source: object) -> None:
        """Forget the encoding: what is derived from a vector has other numbers."""
        self.packed = None


def scale_count(size: int, encoding: SumEncoding) -> int:
    """Count the scales that a vector of so many numbers has in that encoding."""
    if encoding == "float32":
        return 0
    return -(-size // (_BLOCK_OF_SUMS if encoding == "int16" else BLOCK))


_LARGEST = {"float16": 1.0, "int8": 127.0, "int4": 7.0}
"""What the largest number of a block becomes."""
_LARGEST_OF_SUMS = 32_766.0
"""The same in `int16`, where random bits behind the point must not carry beyond the word."""
_LEAST_SCALE = 1e-37
"""Smaller ones have too few digits to divide by: such a block counts as zero."""
_POINT = 65_536
"""A level of a sum, in the units in which it is rounded."""
_ORDER = np.argsort(uniform_keys(0, np.arange(_POINT // 16)))
_DITHER = (16 * _ORDER + 8).astype(np.uint16)
"""Random bits behind the point, each sixteenth once. A generator for each batch of arrivals would
take longer than all else; where in them a sum begins is what its seed says."""


def packed_form(size: int, encoding: SumEncoding) -> tuple[int, str]:
    """Give the length and the type of the array that holds so many numbers.

    Examples
    --------
    >>> packed_form(5, "int8"), packed_form(5, "int4")  # two numbers of 4 bits to a byte
    ((5, 'int8'), (3, 'uint8'))
    """
    return (-(-size // 2), "uint8") if encoding == "int4" else (size, encoding)


def packed_bytes(size: int, encoding: SumEncoding) -> int:
    """Count the bytes that a vector of so many numbers takes in that encoding.

    Examples
    --------
    >>> packed_bytes(1000, "float32"), packed_bytes(1000, "int8")  # and a scale for every 64
    (4000, 1064)
    """
    length, form = packed_form(size, encoding)
    return np.dtype(form).itemsize * length + 4 * scale_count(size, encoding)


def pack(vector: Vector | FloatArray, encoding: SumEncoding, seed: int) -> State:
    """Encode a vector: its numbers and, for the shorter encodings, a scale for every block.

    Parameters
    ----------
    vector : Vector or FloatArray
        The numbers.
    encoding : {"float32", "float16", "int16", "int8", "int4"}
        The last three round at random, so that nothing is lost on average.
    seed : int
        The seed of that rounding.

    Returns
    -------
    State
        `packed` and `scales`.

    Examples
    --------
    >>> packed = pack(np.array([1.0, -0.5, 0.25]), "int8", seed=0)
    >>> packed["packed"].nbytes + packed["scales"].nbytes
    7
    >>> [f"{number:.2f}" for number in unpack(packed, 3)]
    ['1.00', '-0.50', '0.24']
    """
    if encoding == "float32":
        none = np.empty(0, dtype=np.float32)
        return {"packed": vector.astype(np.float32, copy=False), "scales": none}
    if encoding == "int16":
        return _pack_sum(vector, seed)
    largest, size = _LARGEST[encoding], len(vector)
    blocks = np.zeros((scale_count(size, encoding), BLOCK))
    scaled = blocks.reshape(-1)[:size]
    scaled[:] = vector
    scales = (np.abs(blocks).max(axis=1, initial=0.0) / largest).astype(np.float32)
    blocks /= np.where(scales > 0, scales, np.inf).astype(np.float64)[:, None]
    if encoding != "float16":
        scaled += np.random.default_rng(seed).random(size)
        np.floor(scaled, out=scaled)
        np.clip(scaled, -largest, largest, out=scaled)
    if encoding == "int4":
        halves = np.append(scaled, np.zeros(len(scaled) % 2)).astype(np.int8) + 8
        return {"packed": (halves[::2] | halves[1::2] << 4).astype(np.uint8), "scales": scales}
    return {"packed": scaled.astype(encoding), "scales": scales}


def _pack_sum(vector: Vector | FloatArray, seed: int) -> State:
    """Do the same in `int16`, by shifts: a sum is packed with every batch of arrivals.

    An infinite block stays infinite, whatever is added to it.
    """
    size = len(vector)
    blocks = np.zeros((scale_count(size, "int16"), _BLOCK_OF_SUMS), dtype=np.float32)
    blocks.reshape(-1)[:size] = vector
    largest = np.maximum(blocks.max(axis=1, initial=0.0), -blocks.min(axis=1, initial=0.0))
    scales = largest / np.float32(_LARGEST_OF_SUMS)
    scales[scales < _LEAST_SCALE] = 0.0
    endless = ~np.isfinite(scales)
    factors = np.divide(
        np.float32(_POINT), scales, out=np.zeros_like(scales), where=(scales > 0) & ~endless
    )
    blocks *= factors[:, None]
    if endless.any():
        blocks[endless] = _POINT
    fixed = blocks.reshape(-1)[:size].astype(np.int32)
    fixed += np.resize(np.roll(_DITHER, seed % len(_DITHER)), size)
    fixed >>= 16
    return {"packed": fixed.astype(np.int16), "scales": scales}


def unpack(packed: State, size: int) -> Vector:
    """Decode what `pack` made of a vector of so many numbers, as near as it comes.

    Returns
    -------
    Vector
        A `PackedVector` where the encoding is shorter than the vector.
    """
    numbers: AnyArray = packed["packed"]
    scales: Vector = packed["scales"]
    if not len(scales):
        return numbers
    if numbers.dtype == np.uint8:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=1).ravel()[:size].astype(np.int8) - 8
    block = _BLOCK_OF_SUMS if numbers.dtype == np.int16 else BLOCK
    decoded = numbers.astype(np.float32) * np.repeat(scales, block)[:size]
    vector = decoded.view(PackedVector)
    vector.packed = packed
    return vector
