"""Vectors in fewer bytes: what a gist takes at rest."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fedkeep.core.types import AnyArray, FloatArray, State, Vector

Encoding: TypeAlias = Literal["float32", "float16", "int8"]
BLOCK = 64
"""Numbers that share a scale, unless another number of them is asked for."""
_LARGEST = {"float16": 1.0, "int8": 127.0}


@dataclass(frozen=True, eq=False)
class Packed:
    """A vector as it is kept: its numbers, and for the shorter encodings a scale for every block of them."""

    numbers: AnyArray
    scales: Vector
    block: int = BLOCK

    @property
    def nbytes(self) -> int:
        return int(self.numbers.nbytes + self.scales.nbytes)

    def unpack(self) -> Vector:
        if not len(self.scales):
            return self.numbers
        scales = np.repeat(self.scales, self.block)[: len(self.numbers)]
        return self.numbers.astype(np.float32) * scales

    def snapshot(self) -> State:
        return {"packed": self.numbers, "scales": self.scales}

    @staticmethod
    def from_snapshot(state: State, encoding: Encoding, block: int = BLOCK) -> "Packed":
        return Packed(np.array(state["packed"], dtype=encoding), np.array(state["scales"], dtype=np.float32), block)


def packed_bytes(size: int, encoding: Encoding, block: int = BLOCK) -> int:
    """What a vector of so many numbers takes in that encoding.

    >>> packed_bytes(1000, "float32"), packed_bytes(1000, "int8")  # a byte each, and a scale for every 64
    (4000, 1064)
    """
    scales = 0 if encoding == "float32" else 4 * -(-size // block)
    return np.dtype(encoding).itemsize * size + scales


def pack(vector: Vector | FloatArray, encoding: Encoding, seed: int, block: int = BLOCK) -> Packed:
    """The vector in that encoding; `int8` rounds at random by the seed, so that on average nothing is lost.

    >>> packed = pack(np.array([1.0, -0.5, 0.25]), "int8", seed=0)
    >>> packed.nbytes, [f"{number:.2f}" for number in packed.unpack()]
    (7, ['1.00', '-0.50', '0.24'])
    """
    if encoding == "float32":
        return Packed(vector.astype(np.float32, copy=False), np.empty(0, dtype=np.float32))
    blocks = np.abs(np.append(vector, np.zeros(-len(vector) % block))).reshape(-1, block)
    scales = (blocks.max(axis=1) / _LARGEST[encoding]).astype(np.float32)
    steps = np.repeat(scales.astype(np.float64), block)[: len(vector)]
    scaled = np.divide(vector, steps, out=np.zeros(len(vector)), where=steps > 0)
    if encoding == "int8":
        scaled = np.clip(np.floor(scaled + np.random.default_rng(seed).random(len(vector))), -127, 127)
    return Packed(scaled.astype(encoding), scales, block)
