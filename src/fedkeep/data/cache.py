"""Finds data files on this machine, or fetches them once from their official address.

Places, in order: the folder in the environment variable FEDKEEP_DATA, the user's cache, Debian's
dataset folder. A file is laid either in a folder of its dataset or directly in the place. What is
slow to parse is kept parsed. Nothing here prints: progress is a callback.
"""

import gzip
import hashlib
import http.client
import os
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.core.types import State
from fedkeep.files import alone_in, atomic_write, put_in_place, sync

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes that are there, and the bytes expected (None: unknown)."""

_PIECE, _TRIES, _TIMEOUT = 1 << 16, 5, 30.0


@dataclass(frozen=True)
class RemoteFile:
    """A data file, where it officially lives, and how to know it."""

    dataset: str
    name: str
    url: str | None
    """None: only the user can fetch it, as `how` says."""
    checksum: str
    algorithm: Literal["md5", "sha256"] = "sha256"
    of: Literal["file", "gzip content", "zipped CSV files"] = "file"
    """What the checksum covers: distributors compress anew, so it may be what is inside."""
    how: str = ""


def places() -> tuple[Path, ...]:
    """Return the folders that are searched, in order."""
    named = os.environ.get("FEDKEEP_DATA")
    return (*([Path(named)] if named else []), user_cache(), Path("/usr/share/datasets"))


def user_cache() -> Path:
    """Return the folder for downloads and parsed data; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedkeep"


def find(file: RemoteFile) -> Path | None:
    """Where the file is on this machine, unchecked."""
    found = (
        path
        for at in places()
        for path in (at / file.dataset / file.name, at / file.name)
        if path.is_file()
    )
    return next(found, None)


def obtain(file: RemoteFile, progress: Progress | None = None) -> Path:
    """Find the file, or download it, and check it by its checksum.

    It is downloaded into the user's cache if it is nowhere.

    It is fetched into `target`.part, goes on where an earlier try stopped, and is moved into place
    once it is checked.
    """
    if (found := find(file)) is not None:
        check(found, file)
        return found
    target = user_cache() / file.dataset / file.name
    if file.url is None:
        why = f"is not here and cannot be downloaded by fedkeep: {file.how}, and put it at {target}"
        raise DataError(f"{file.name} {why}")
    part = target.with_name(target.name + ".part")
    try:
        with alone_in(target.parent):  # parallel runs of a sweep all want the same file first
            if not target.exists():
                try:
                    _fetch(file.url, part, progress)
                except DataError as error:
                    otherwise = f"or fetch it otherwise and put it at {target}"
                    raise DataError(f"{error}; {otherwise}") from None
                try:
                    check(part, file)
                except DataError:
                    part.unlink()
                    raise
                sync(part)
                put_in_place(part, target)
    except OSError as error:
        raise DataError(
            f"cannot write {part}: {error}; set FEDKEEP_DATA or XDG_CACHE_HOME to another folder"
        ) from None
    return target


def check(path: Path, file: RemoteFile) -> None:
    """Refuse a file whose checksum is not the expected one.

    That of a zip covers its CSV files, whatever folder.
    """
    summed = hashlib.new(file.algorithm)
    try:
        if file.of == "zipped CSV files":
            with zipfile.ZipFile(path) as archive:
                found = sorted(
                    (PurePosixPath(member).name, member) for member in archive.namelist()
                )
                for name, member in found:
                    if name.endswith(".csv"):
                        summed.update(name.encode() + archive.read(member))
        else:
            with gzip.open(path) if file.of == "gzip content" else path.open("rb") as content:
                summed = hashlib.file_digest(content, file.algorithm)
    except (gzip.BadGzipFile, zlib.error, zipfile.BadZipFile, EOFError) as error:
        raise DataError(
            f"{path} is damaged ({error}); remove it, and it will be fetched anew"
        ) from None
    if summed.hexdigest() != file.checksum:
        raise DataError(
            f"{path} is not the file it should be: {file.algorithm} of the {file.of} is "
            f"{summed.hexdigest()}, expected {file.checksum}; "
            "remove it, and it will be fetched anew"
        )


def _fetch(url: str, part: Path, progress: Progress | None) -> None:
    problem = ""
    for _ in range(_TRIES):
        try:
            return _fetch_rest(url, part, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # all of it was there
                return None
            raise DataError(f"cannot download {url}: {error.code} {error.reason}") from None
        except (
            http.client.HTTPException,
            urllib.error.URLError,
            ConnectionError,
            TimeoutError,
        ) as error:
            problem = str(error)
    raise DataError(
        f"cannot download {url}: {problem}; what came is kept, try again to go on from there"
    )


def _fetch_rest(url: str, part: Path, progress: Progress | None) -> None:
    """Append to `part` what it lacks.

    Raises IncompleteRead when the connection drops before the end.
    """
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        resumed = response.status == HTTPStatus.PARTIAL_CONTENT
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumed else "wb") as out:
            while chunk := response.read(_PIECE):
                out.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(part.stem, have, total)
    if total is not None and have < total:
        raise http.client.IncompleteRead(b"", total - have)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read the unsigned bytes of a gzipped IDX file, the format of MNIST."""
    content = gzip.decompress(path.read_bytes())
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{path} is not an IDX file of unsigned bytes")
    shape = tuple(np.frombuffer(content, dtype=">u4", count=content[3], offset=4).astype(int))
    body = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * content[3])
    if body.size != np.prod(shape):
        raise DataError(f"{path} is cut short: {body.size} values for shape {shape}")
    return body.reshape(shape)


def remembered(name: str, make: Callable[[], State]) -> State:
    """Return what `make` returns, from the cache if it is there.

    `name` must contain all that it depends on.

    A cache that is damaged or cannot be written costs time, never the run.
    """
    path = user_cache() / "parsed" / f"{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as kept:
            return dict(kept)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        made = make()
    with suppress(OSError), alone_in(path.parent), atomic_write(path) as file:
        np.savez(file, **made)  # type: ignore[arg-type]
    return made
