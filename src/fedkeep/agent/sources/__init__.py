"""Where samples come from.

One file per kind of source but the shortest, and the table that finds them by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from fedkeep.agent.arrivals import IngestQueue, Source
from fedkeep.agent.sources.folder import FolderSource
from fedkeep.agent.sources.http import HttpSource
from fedkeep.agent.sources.lines import LinesSource
from fedkeep.agent.sources.mqtt import MqttSource
from fedkeep.agent.sources.records import RecordsSource
from fedkeep.core.errors import ConfigError
from fedkeep.core.registry import find
from fedkeep.loading import load_object
from fedkeep.tables import Table, build


@dataclass
class IteratorSource(Source):
    """Any Python iterator of (x, y), (x, y, id) or (x, y, id, {"time": ..., other fields})."""

    function: str
    """`module:function`, called without arguments; it returns an iterable."""

    def open(self) -> None:
        """Import the function."""
        self._items: Callable[[], Iterable[Any]] = load_object(self.function)
        if not callable(self._items):
            raise ConfigError(f"source '{self.name}': {self.function} is not a function")

    def run(self, intake: IngestQueue) -> None:
        """Take one item after another until there is none."""
        for item in self._items():
            if intake.stopped:
                return
            try:
                x, y, *rest = item
            except Exception:  # noqa: BLE001 - an item may raise anything when it is taken apart
                intake.refuse("malformed", self.name, item)
                continue
            fields = dict(rest[1]) if rest[1:] and isinstance(rest[1], Mapping) else {}
            time = fields.pop("time", None)
            if not self.deliver(intake, x, y, rest[0] if rest else None, time=time, fields=fields):
                return


_LONGEST_NAME = 128
KINDS: dict[str, type[Source]] = {
    "lines": LinesSource,
    "folder": FolderSource,
    "socket": RecordsSource,
    "mqtt": MqttSource,
    "http": HttpSource,
    "iterator": IteratorSource,
}


def check_names(sources: Sequence[Source]) -> None:
    """Raise where two sources have one name, or a name does not fit beside the samples."""
    seen: set[str] = set()
    for source in sources:
        if source.name in seen:
            raise ConfigError(
                f"two sources are called '{source.name}': give each [[source]] a name of its own, "
                "and both the same namespace if their ids are of the same samples"
            )
        seen.add(source.name)
        for name in (source.name, source.namespace or ""):
            if len(name.encode(errors="replace")) > _LONGEST_NAME:
                raise ConfigError(
                    f"the names of sources and namespaces have at most {_LONGEST_NAME} bytes, "
                    f"not as many as '{name[:20]}...'"
                )


def make_source(table: Table, number: int) -> Source:
    """Return the source that one `[[source]]` table describes; `kind` may be `module:Class`."""
    where, keys = f"source[{number}]", dict(table)
    kind = str(keys.pop("kind", ""))
    if not kind:
        raise ConfigError(f"'{where}.kind' is missing: choose one of {', '.join(KINDS)}")
    if ":" in kind:
        made = load_object(kind)
        if not (isinstance(made, type) and issubclass(made, Source) and is_dataclass(made)):
            raise ConfigError(
                f"'{where}.kind' = '{kind}' is not a dataclass under fedkeep.agent.arrivals.Source"
            )
        return build(made, {"name": kind.partition(":")[2].lower(), **keys}, where)
    return build(find(kind, KINDS, "kind of source"), {"name": kind, **keys}, where)
