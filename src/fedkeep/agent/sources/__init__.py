"""Where samples come from: one file per kind of source, and the table that finds them by name."""

from typing import Any

from fedkeep.agent.arrivals import Source
from fedkeep.agent.sources.folder import FolderOptions, FolderSource
from fedkeep.agent.sources.iterator import IteratorOptions, IteratorSource
from fedkeep.agent.sources.lines import LinesOptions, LinesSource
from fedkeep.agent.sources.mqtt import MqttOptions, MqttSource
from fedkeep.agent.sources.records import RecordsOptions, RecordsSource
from fedkeep.config import build
from fedkeep.core.errors import ConfigError
from fedkeep.core.names import find

KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "lines": (LinesOptions, LinesSource),
    "folder": (FolderOptions, FolderSource),
    "socket": (RecordsOptions, RecordsSource),
    "mqtt": (MqttOptions, MqttSource),
    "iterator": (IteratorOptions, IteratorSource),
}


def make_source(table: dict[str, Any], number: int, sample_bytes: int) -> Source:
    """The source that one `[[source]]` table describes; `sample_bytes` bounds what it reads at once."""
    where = f"source[{number}]"
    if "kind" not in table:
        raise ConfigError(f"'{where}.kind' is missing: choose one of {', '.join(KINDS)}")
    options, source = find(str(table["kind"]), KINDS, "kind of source")
    rest = {key: value for key, value in table.items() if key != "kind"}
    rest.setdefault("name", str(table["kind"]))
    made: Source = source(build(options, rest, where), sample_bytes)
    return made
