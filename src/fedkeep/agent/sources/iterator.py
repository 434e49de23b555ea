"""Any Python iterator of (x, y) or (x, y, id), by `module:function`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fedkeep.agent.arrivals import Arrival, Intake, Source
from fedkeep.core.errors import ConfigError
from fedkeep.loading import load_object


@dataclass
class IteratorSource(Source):
    function: str
    """`module:function`, called without arguments; it returns an iterable."""
    overload: Literal["wait", "sample"] = "wait"
    """When the agent cannot keep up: hold the iterator back, or value an even sample."""

    def open(self) -> None:
        self._items: Callable[[], Iterable[Any]] = load_object(self.function)
        if not callable(self._items):
            raise ConfigError(f"source '{self.name}': {self.function} is not a function")

    def run(self, intake: Intake) -> None:
        for item in self._items():
            if intake.stopped:
                return
            try:
                x, y, *rest = item
            except Exception:  # noqa: BLE001 - an item may raise anything when it is taken apart
                intake.refuse("malformed", self.name, item)
                continue
            intake.offer(Arrival(x, y, rest[0] if rest else None, self.name), wait=self.overload == "wait")
