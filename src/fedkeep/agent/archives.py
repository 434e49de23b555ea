"""Reading npz archives that anyone may have written: never more bytes than allowed, whatever they say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.core.types import AnyArray


class OversizedError(DataError):
    """It is, or would unpack to, more bytes than allowed."""


def read_npz(path: Path, limit: int) -> dict[str, AnyArray]:
    """The arrays of an archive; Python objects are no arrays here. A damaged one may raise anything."""
    from zipfile import ZipFile  # a megabyte that other agents do not need

    if path.stat().st_size > limit:
        raise OversizedError(f"{path} has more than {limit} bytes")
    with ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > limit:
            raise OversizedError(f"{path} would unpack to more than {limit} bytes")
        arrays = {}
        for member in members:
            with archive.open(member) as file:
                arrays[member.filename.removesuffix(".npy")] = _array(file, member.file_size)
        return arrays


def _array(file: IO[bytes], size: int) -> AnyArray:
    """An array whose header does not claim more than there is."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    count = int(np.prod(shape, dtype=object))
    if dtype.hasobject or not 0 <= count * dtype.itemsize <= size:
        raise DataError(f"an array of {shape} {dtype} is not in {size} bytes")
    data = np.frombuffer(file.read(count * dtype.itemsize), dtype, count)
    return data.reshape(shape, order="F" if fortran else "C")
