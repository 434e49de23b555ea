"""Reading npz archives that anyone may have written: never more bytes than allowed, whatever they say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.core.types import AnyArray

_ENTRY = b"PK\1\2"
"""How each entry of an archive's table of contents begins."""
_MOST_ENTRIES = 64
_CHUNK = 1 << 20


class OversizedError(DataError):
    """It is, or would unpack to, more bytes than allowed."""


def read_npz(path: Path, limit: int) -> dict[str, AnyArray]:
    """The arrays of an archive; Python objects are no arrays here. A damaged one may raise anything."""
    from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile  # a megabyte that other agents do not need

    if not path.is_file():  # a pipe would be waited for, a device read for ever
        raise DataError(f"{path} is not a file")
    if path.stat().st_size > limit:
        raise OversizedError(f"{path} has more than {limit} bytes")
    if _entries(path) > _MOST_ENTRIES:  # each becomes an object many times its size
        raise OversizedError(f"{path} holds more than {_MOST_ENTRIES} arrays")
    with ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > limit:
            raise OversizedError(f"{path} would unpack to more than {limit} bytes")
        if any(member.compress_type not in (ZIP_STORED, ZIP_DEFLATED) for member in members):
            raise DataError(f"{path} is compressed in a way of which zipfile does not bound what it unpacks to")
        arrays = {}
        for member in members:
            with archive.open(member) as file:
                arrays[member.filename.removesuffix(".npy")] = _array(file, member.file_size)
        return arrays


def _entries(path: Path) -> int:
    """At least as many as the archive has: what it says of their number need not be true."""
    count, seam = 0, b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            count += (seam + chunk).count(_ENTRY)
            seam = chunk[-len(_ENTRY) + 1 :]
    return count


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
