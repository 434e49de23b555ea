"""Things by name: what to answer when a name is unknown, and where `module:name` leads."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedkeep.core.errors import ConfigError

Thing = TypeVar("Thing")
Registered = TypeVar("Registered")


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


class Registry(dict[str, Thing]):
    """Things of one kind by their names in TOML files; a class of one's own goes by `module:Class`.

    >>> shapes: Registry[type] = Registry("shape", methods=("area",))
    >>> @shapes.register("square")
    ... class Square:
    ...     side: float = 1.0
    ...     def area(self) -> float:
    ...         return self.side**2
    >>> shapes.find("square")(side=3.0).area()
    9.0
    """

    def __init__(
        self,
        kind: str,
        members: Mapping[str, Thing] | None = None,
        *,
        methods: tuple[str, ...] = (),
        base: type = object,
    ) -> None:
        super().__init__(members or {})
        self.kind = kind
        self._methods = methods
        """What a class of one's own must be able to do."""
        self._base = base

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Puts what it stands above under a name; a class becomes a frozen dataclass, its fields keys of a table."""

        def add(thing: Registered) -> Registered:
            made: Any = dataclass(frozen=True)(thing) if isinstance(thing, type) else thing
            self[name] = made
            return thing

        return add

    def find(self, name: str) -> Thing:
        """The member of that name, or the class at `module:Class`."""
        if ":" not in name:
            return find(name, self, self.kind)
        found = load_object(name)
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigError(f"{name} is no {self.kind}: it must be a subclass of {self._base.__name__}")
        missing = [method for method in self._methods if not callable(getattr(found, method, None))]
        missing += sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"{name} is no {self.kind}, it lacks a method: {', '.join(missing)}")
        if "__dataclass_fields__" not in vars(found):
            raise ConfigError(f"{name} is no dataclass: put @dataclass(frozen=True) above the class")
        return found  # type: ignore[return-value]


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
