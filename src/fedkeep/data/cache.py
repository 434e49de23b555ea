"""Finds data files on this machine, or fetches them once from their official address.

Places, in order: the folder in the environment variable FEDKEEP_DATA, the user's cache, Debian's dataset
folder. A file is laid either in a folder of its dataset or directly in the place. What is slow to parse is
kept parsed. Nothing here prints: progress is a callback.
"""

import gzip
import hashlib
import http.client
import os
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.core.types import State
from fedkeep.files import alone_in, put_in_place, sync, writing

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes that are there, and the bytes expected (None: unknown)."""

Covered: TypeAlias = Literal["file", "gzip content", "zipped CSV files"]

_PIECE = 1 << 16
_TRIES = 5
_TIMEOUT = 30.0
_PARTIAL_CONTENT = 206
_RANGE_BEYOND_THE_END = 416
_UNSIGNED_BYTE = 0x08


@dataclass(frozen=True)
class RemoteFile:
    """A data file, where it officially lives, and how to know it."""

    dataset: str
    """Its folder in a place."""
    name: str
    url: str | None
    """None: only the user can fetch it, as `how` says."""
    checksum: str
    """Hexadecimal digest."""
    algorithm: Literal["md5", "sha256"] = "sha256"
    of: Covered = "file"
    """What the checksum covers: distributors compress anew, so it may be what is inside."""
    how: str = ""


def places() -> tuple[Path, ...]:
    """The folders that are searched, in order."""
    named = os.environ.get("FEDKEEP_DATA")
    return (*([Path(named)] if named else []), user_cache(), Path("/usr/share/datasets"))


def user_cache() -> Path:
    """The folder for downloads and parsed data; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedkeep"


def find(file: RemoteFile) -> Path | None:
    """Where the file is on this machine, unchecked."""
    for place in places():
        for path in (place / file.dataset / file.name, place / file.name):
            if path.is_file():
                return path
    return None


def obtain(file: RemoteFile, progress: Progress | None = None) -> Path:
    """The path of the file, checked by its checksum; downloaded into the user's cache if it is nowhere."""
    found = find(file)
    if found is not None:
        check(found, file)
        return found
    target = user_cache() / file.dataset / file.name
    if file.url is None:
        why = f"is not here and cannot be downloaded by fedkeep: {file.how}, and put it at {target}"
        raise DataError(f"{file.name} {why}")
    return _download(file, file.url, target, progress)


def check(path: Path, file: RemoteFile) -> None:
    """Refuses a file whose checksum is not the expected one."""
    actual = digest(path, file.algorithm, file.of)
    if actual != file.checksum:
        raise DataError(
            f"{path} is not the file it should be: {file.algorithm} of the {file.of} is {actual}, "
            f"expected {file.checksum}; remove it, and it will be fetched anew"
        )


def digest(path: Path, algorithm: Literal["md5", "sha256"], of: Covered) -> str:
    """The checksum of a file's bytes or of what is inside it."""
    try:
        if of == "zipped CSV files":
            return hashlib.new(algorithm, b"".join(_zipped_tables(path))).hexdigest()
        with gzip.open(path) if of == "gzip content" else path.open("rb") as content:
            return hashlib.file_digest(content, algorithm).hexdigest()
    except (gzip.BadGzipFile, zlib.error, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it, and it will be fetched anew") from None


def _zipped_tables(path: Path) -> Iterator[bytes]:
    """The CSV files of a zip in the order of their names, whatever folder they are in."""
    with zipfile.ZipFile(path) as archive:
        for member in sorted(archive.namelist(), key=lambda name: PurePosixPath(name).name):
            if member.endswith(".csv"):
                yield PurePosixPath(member).name.encode()
                yield archive.read(member)


def _download(file: RemoteFile, url: str, target: Path, progress: Progress | None) -> Path:
    """Fetches into `target`.part, goes on where an earlier try stopped, and moves it into place once it is checked."""
    part = target.with_name(target.name + ".part")
    try:
        with alone_in(target.parent):  # parallel runs of a sweep all want the same file first
            if not target.exists():
                _fetch(url, part, progress)
                try:
                    check(part, file)
                except DataError:
                    part.unlink()
                    raise
                sync(part)
                put_in_place(part, target)
    except OSError as error:
        raise DataError(f"cannot write {part}: {error}; set FEDKEEP_DATA or XDG_CACHE_HOME to another folder") from None
    return target


def _fetch(url: str, part: Path, progress: Progress | None) -> None:
    problem = ""
    for _ in range(_TRIES):
        try:
            _fetch_rest(url, part, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == _RANGE_BEYOND_THE_END:
                return
            raise DataError(f"cannot download {url}: {error.code} {error.reason}") from None
        except (http.client.HTTPException, urllib.error.URLError, ConnectionError, TimeoutError) as error:
            problem = str(error)
        else:
            return
    raise DataError(f"cannot download {url}: {problem}; what came is kept, try again to go on from there")


def _fetch_rest(url: str, part: Path, progress: Progress | None) -> None:
    """Appends to `part` what it lacks; raises IncompleteRead when the connection drops before the end."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        resumed = response.status == _PARTIAL_CONTENT
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumed else "wb") as out:
            for chunk in iter(lambda: response.read(_PIECE), b""):
                out.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(part.stem, have, total)
    if total is not None and have < total:
        raise http.client.IncompleteRead(b"", total - have)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of unsigned bytes in a gzipped IDX file, the format of MNIST and its relatives."""
    content = gzip.decompress(path.read_bytes())
    if len(content) < 4 or content[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
        raise DataError(f"{path} is not an IDX file of unsigned bytes")
    axes = content[3]
    shape = tuple(np.frombuffer(content, dtype=">u4", count=axes, offset=4).astype(int))
    body = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes)
    if body.size != np.prod(shape):
        raise DataError(f"{path} is cut short: {body.size} values for shape {shape}")
    return body.reshape(shape)


def remembered(name: str, make: Callable[[], State]) -> State:
    """What `make` returns, from the cache if it is there; `name` carries all that it depends on.

    A cache that is damaged or cannot be written costs time, never the run.
    """
    path = user_cache() / "parsed" / f"{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as kept:
            return dict(kept)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        made = make()
    with suppress(OSError), alone_in(path.parent), writing(path) as file:
        np.savez(file, **made)  # type: ignore[arg-type]
    return made
