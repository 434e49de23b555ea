"""A run's state on disk: written whole or not at all."""

import zipfile
from pathlib import Path

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.core.types import State
from fedkeep.files import writing


def save_checkpoint(path: Path, state: State) -> None:
    """Writes the state; a kill leaves the old one or the new one."""
    with writing(path) as file:
        np.savez(file, **{_escape(name): array for name, array in state.items()})  # type: ignore[arg-type]


def load_checkpoint(path: Path) -> State | None:
    """The state last saved; None if there is none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {_unescape(name): arrays[name] for name in arrays.files}
    except FileNotFoundError:
        return None
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise DataError(f"the checkpoint {path} is damaged; delete it to start that run anew") from error


def _escape(name: str) -> str:
    """Names in a zip file are paths: slashes would become folders."""
    return name.replace("/", "|")


def _unescape(name: str) -> str:
    return name.replace("|", "/")
