"""Reads IDX files, the format of MNIST and its relatives."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of unsigned bytes in a gzipped IDX file."""
    content = gzip.decompress(path.read_bytes())
    if len(content) < 4 or content[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
        raise DataError(f"{path} is not an IDX file of unsigned bytes")
    axes = content[3]
    shape = tuple(np.frombuffer(content, dtype=">u4", count=axes, offset=4).astype(int))
    body = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes)
    if body.size != np.prod(shape):
        raise DataError(f"{path} is cut short: {body.size} values for shape {shape}")
    return body.reshape(shape)
