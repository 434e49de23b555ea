"""Things by name: what to answer when a name is unknown, and where `module:name` leads."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from fedkeep.core.errors import ConfigError

Thing = TypeVar("Thing")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest known one, or all of them."""
    words = sorted(known)
    near = get_close_matches(word, words, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(words)}"


def find(name: str, known: Mapping[str, Thing], kind: str) -> Thing:
    """The thing of that name; `kind` says in an error what was looked for."""
    if name not in known:
        raise ConfigError(f"unknown {kind} '{name}': {did_you_mean(name, known)}")
    return known[name]


def load_object(path: str) -> Any:
    """What stands at `module:name` or `path/to/file.py:name`; modules are looked for in the working directory too."""
    module, _, name = path.rpartition(":")
    folder = Path.cwd()
    if module.endswith(".py"):
        folder, module = Path(module).resolve().parent, Path(module).stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        loaded = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"cannot import '{module}' (of '{path}'): {error}") from error
    if not hasattr(loaded, name):
        public = [n for n in vars(loaded) if not n.startswith("_")]
        raise ConfigError(f"'{module}' has no '{name}': {did_you_mean(name, public)}")
    return getattr(loaded, name)
