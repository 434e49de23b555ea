"""Components by name, and the hint for an unknown name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from fedkeep.core.errors import ConfigError

Thing = TypeVar("Thing")
Registered = TypeVar("Registered", bound=type)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt word: the nearest known one, or all of them.

    >>> did_you_mean("fifi", ["ode", "fifo"]), did_you_mean("newest", ["ode", "fifo"])
    ("did you mean 'fifo'?", 'known are: fifo, ode')
    """
    words = sorted(known)
    near = get_close_matches(word, words, n=1)
    if not words:
        return "there are none"
    return f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(words)}"


def find(name: str, known: Mapping[str, Thing], kind: str) -> Thing:
    """Return the component of that name; an error names the `kind` that was looked for."""
    if name not in known:
        raise ConfigError(f"unknown {kind} '{name}': {did_you_mean(name, known)}")
    return known[name]


class Registry(dict[str, Thing]):
    """Components of one kind by their names in TOML files.

    >>> shapes: Registry[type] = Registry("shape", methods=("area",))
    >>> @shapes.register("square")
    ... class Square:
    ...     side: float = 1.0
    ...     def area(self) -> float:
    ...         return self.side**2
    >>> shapes["square"](side=3.0).area()
    9.0
    """

    def __init__(
        self,
        kind: str,
        members: Mapping[str, Thing] | None = None,
        *,
        methods: Iterable[str] = (),
        base: type = object,
    ) -> None:
        super().__init__(members or {})
        self.kind, self._base, self._methods = kind, base, methods
        """What a class must be and be able to do to be admitted."""

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Register the decorated class as a frozen dataclass; its fields are keys of a table."""

        def add(thing: Registered) -> Registered:
            self[name] = dataclass(frozen=True)(thing)  # type: ignore[assignment]
            return thing

        return add

    def admit(self, name: str, found: Any) -> Thing:
        """Return the class found elsewhere under `name`, if it is of this kind.

        Raises
        ------
        ConfigError
            If it is no subclass, lacks a method or is no dataclass.
        """
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigError(
                f"{name} is no {self.kind}: it must be a subclass of {self._base.__name__}"
            )
        missing = [method for method in self._methods if not callable(getattr(found, method, None))]
        missing += sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"{name} is no {self.kind}, it lacks a method: {', '.join(missing)}")
        if "__dataclass_fields__" not in vars(found):
            raise ConfigError(
                f"{name} is no dataclass: put @dataclass(frozen=True) above the class"
            )
        return found  # type: ignore[return-value]
