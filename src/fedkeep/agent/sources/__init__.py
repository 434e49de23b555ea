"""Where samples come from: one file per kind of source, and the table that finds them by name."""

from fedkeep.agent.arrivals import Source
from fedkeep.agent.sources.folder import FolderSource
from fedkeep.agent.sources.iterator import IteratorSource
from fedkeep.agent.sources.lines import LinesSource
from fedkeep.agent.sources.mqtt import MqttSource
from fedkeep.agent.sources.records import RecordsSource
from fedkeep.config import Table, build
from fedkeep.core.errors import ConfigError
from fedkeep.core.names import find

KINDS: dict[str, type[Source]] = {
    "lines": LinesSource,
    "folder": FolderSource,
    "socket": RecordsSource,
    "mqtt": MqttSource,
    "iterator": IteratorSource,
}


def make_source(table: Table, number: int) -> Source:
    """The source that one `[[source]]` table describes."""
    where, keys = f"source[{number}]", dict(table)
    kind = str(keys.pop("kind", ""))
    if not kind:
        raise ConfigError(f"'{where}.kind' is missing: choose one of {', '.join(KINDS)}")
    return build(find(kind, KINDS, "kind of source"), {"name": kind, **keys}, where)
