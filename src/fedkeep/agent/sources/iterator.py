"""Any Python iterator of (x, y) or (x, y, id), by `module:function`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fedkeep.agent.arrivals import Arrival, Sink
from fedkeep.core.errors import ConfigError
from fedkeep.loading import load_object


@dataclass(frozen=True)
class IteratorOptions:
    name: str
    """How messages, `why` and `erase --source` call it."""
    function: str
    """`module:function`, called without arguments; it returns an iterable."""
    overload: Literal["wait", "sample"] = "wait"
    """When the agent cannot keep up: hold the iterator back, or value an even sample."""


class IteratorSource:
    def __init__(self, options: IteratorOptions, sample_bytes: int) -> None:  # noqa: ARG002 - items come one by one
        self.name = options.name
        self._options = options
        self._function: Callable[[], Iterable[tuple[Any, ...]]] | None = None

    def open(self) -> None:
        self._function = load_object(self._options.function)
        if not callable(self._function):
            raise ConfigError(f"source '{self.name}': {self._options.function} is not a function")

    def run(self, sink: Sink) -> None:
        assert self._function is not None
        for item in self._function():
            if sink.stopped:
                return
            try:
                x, y, *rest = item
            except Exception:  # noqa: BLE001 - an item may raise anything when it is taken apart
                sink.refuse("malformed", self.name, item)
                continue
            sink.offer(Arrival(x, y, rest[0] if rest else None, self.name), wait=self._options.overload == "wait")

    def close(self) -> None: ...
