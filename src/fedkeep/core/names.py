"""Things by name: what to answer when a name is unknown, and where `module:name` leads."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
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
    try:
        loaded = _load_file(Path(module).resolve()) if module.endswith(".py") else _load_module(module)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"cannot import '{module}' (of '{path}'): {error}") from error
    except SyntaxError as error:
        raise ConfigError(f"cannot import '{module}': {error.msg} in line {error.lineno}") from error
    if not hasattr(loaded, name):
        public = [n for n in vars(loaded) if not n.startswith("_")]
        raise ConfigError(f"'{module}' has no '{name}': {did_you_mean(name, public)}")
    return getattr(loaded, name)


def _load_module(name: str) -> ModuleType:
    _search_in(Path.cwd())
    return importlib.import_module(name)


def _load_file(file: Path) -> ModuleType:
    """The file as a module called by its whole path: another of the same name elsewhere is not taken for it."""
    known = sys.modules.get(str(file))
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(str(file), file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    _search_in(file.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(file)] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(file)]
        raise
    return module


def _search_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
