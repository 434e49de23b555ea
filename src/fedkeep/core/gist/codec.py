"""How a gist is kept in few bytes: as it is, in half precision, or as whole numbers with scales."""

from typing import Literal, TypeAlias

import numpy as np

from fedkeep.core.types import FloatArray, State, Vector

Encoding: TypeAlias = Literal["float32", "float16", "int8"]
"""In which numbers a gist is kept."""
BLOCK = 64
"""Numbers that share a scale in the shorter encodings."""


def scale_count(size: int, encoding: Encoding) -> int:
    """Count the scales that a vector of so many numbers has in that encoding."""
    return 0 if encoding == "float32" else -(-size // BLOCK)


def packed_bytes(size: int, encoding: Encoding) -> int:
    """Count the bytes that a vector of so many numbers takes in that encoding.

    Examples
    --------
    >>> packed_bytes(1000, "float32"), packed_bytes(1000, "int8")  # and a scale for every 64
    (4000, 1064)
    """
    return np.dtype(encoding).itemsize * size + 4 * scale_count(size, encoding)


def pack(vector: Vector | FloatArray, encoding: Encoding, seed: int) -> State:
    """Encode a vector: its numbers and, for the shorter encodings, a scale for every block.

    Parameters
    ----------
    vector : Vector or FloatArray
        The numbers.
    encoding : {"float32", "float16", "int8"}
        `int8` rounds at random, so that nothing is lost on average.
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
    >>> [f"{number:.2f}" for number in unpack(packed)]
    ['1.00', '-0.50', '0.24']
    """
    if encoding == "float32":
        none = np.empty(0, dtype=np.float32)
        return {"packed": vector.astype(np.float32, copy=False), "scales": none}
    blocks = np.abs(np.append(vector, np.zeros(-len(vector) % BLOCK))).reshape(-1, BLOCK)
    largest = 127.0 if encoding == "int8" else 1.0
    scales = (blocks.max(axis=1) / largest).astype(np.float32)
    steps = np.repeat(scales.astype(np.float64), BLOCK)[: len(vector)]
    scaled = np.divide(vector, steps, out=np.zeros(len(vector)), where=steps > 0)
    if encoding == "int8":
        dither = np.random.default_rng(seed).random(len(vector))
        scaled = np.clip(np.floor(scaled + dither), -127, 127)
    return {"packed": scaled.astype(encoding), "scales": scales}


def unpack(packed: State) -> Vector:
    """Decode what `pack` made of a vector, as near as it comes."""
    numbers: Vector = packed["packed"]
    scales: Vector = packed["scales"]
    if not len(scales):
        return numbers
    return numbers.astype(np.float32) * np.repeat(scales, BLOCK)[: len(numbers)]
