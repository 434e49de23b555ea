"""Keeps the outcome of slow parsing in the user's cache."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from fedkeep.core.types import State
from fedkeep.data.cache import user_cache


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
    part = path.with_name(f"{name}.{os.getpid()}.part.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(part, **made)  # type: ignore[arg-type]
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return made
