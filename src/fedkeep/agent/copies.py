"""Numbered copies of a damaged store, within a bound of bytes, and gone when a sample must not outlive the store."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def copies_of(path: Path) -> list[Path]:
    """The copies set aside so far, oldest first."""
    found = [
        file for file in path.parent.glob(f"{path.name}.damaged-*") if file.suffix.removeprefix(".damaged-").isdigit()
    ]
    return sorted(found, key=lambda file: int(file.name.rpartition("-")[2]))


def set_aside(path: Path, allowed: int) -> None:
    """Keeps a copy of a damaged file for whoever wants to look, if all copies stay within `allowed` bytes."""
    import shutil  # a megabyte that most agents never need

    copies = copies_of(path)
    if sum(file.stat().st_size for file in (path, *copies)) > allowed:
        log.warning("no copy of the damaged file is kept: [store] damaged_bytes = %d has no room for one", allowed)
        return
    number = int(copies[-1].name.rpartition("-")[2]) + 1 if copies else 1
    aside = path.with_name(f"{path.name}.damaged-{number}")
    try:
        with aside.open("xb") as copy, path.open("rb") as file:
            aside.chmod(0o600)
            shutil.copyfileobj(file, copy)
        log.warning("a copy of the damaged file is at %s", aside)
    except OSError as error:
        aside.unlink(missing_ok=True)
        log.warning("there was no room to set a copy of the damaged file aside (%s)", error.strerror)


def discard_copies(path: Path) -> None:
    """Overwrites and removes all copies: they hold samples that must not outlive the store's own."""
    for aside in copies_of(path):
        with aside.open("r+b") as file:
            file.write(bytes(aside.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        aside.unlink()
