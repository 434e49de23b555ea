"""Vectors in fewer bytes: what a gist takes at rest."""

from typing import Literal, TypeAlias

import numpy as np

from fedkeep.core.types import FloatArray, State, Vector

Encoding: TypeAlias = Literal["float32", "float16", "int8"]
BLOCK = 64
"""Numbers that share a scale, unless another number of them is asked for."""


def packed_bytes(size: int, encoding: Encoding, block: int = BLOCK) -> int:
    """What a vector of so many numbers takes in that encoding.

    >>> packed_bytes(1000, "float32"), packed_bytes(1000, "int8")  # a byte each, and a scale for every 64
    (4000, 1064)
    """
    scales = 0 if encoding == "float32" else 4 * -(-size // block)
    return np.dtype(encoding).itemsize * size + scales


def pack(vector: Vector | FloatArray, encoding: Encoding, seed: int, block: int = BLOCK) -> State:
    """The numbers of a vector in that encoding and, for the shorter ones, a scale for every block of them.

    `int8` rounds at random by the seed, so that on average nothing is lost.

    >>> packed = pack(np.array([1.0, -0.5, 0.25]), "int8", seed=0)
    >>> packed["packed"].nbytes + packed["scales"].nbytes, [f"{number:.2f}" for number in unpack(packed)]
    (7, ['1.00', '-0.50', '0.24'])
    """
    if encoding == "float32":
        return {"packed": vector.astype(np.float32, copy=False), "scales": np.empty(0, dtype=np.float32)}
    blocks = np.abs(np.append(vector, np.zeros(-len(vector) % block))).reshape(-1, block)
    scales = (blocks.max(axis=1) / (127.0 if encoding == "int8" else 1.0)).astype(np.float32)
    steps = np.repeat(scales.astype(np.float64), block)[: len(vector)]
    scaled = np.divide(vector, steps, out=np.zeros(len(vector)), where=steps > 0)
    if encoding == "int8":
        scaled = np.clip(np.floor(scaled + np.random.default_rng(seed).random(len(vector))), -127, 127)
    return {"packed": scaled.astype(encoding), "scales": scales}


def unpack(packed: State, block: int = BLOCK) -> Vector:
    """The vector that `pack` made this of, as near as it comes."""
    numbers, scales = packed["packed"], packed["scales"]
    return numbers.astype(np.float32) * np.repeat(scales, block)[: len(numbers)] if len(scales) else numbers
