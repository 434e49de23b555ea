"""Several streams in one process: each with its own samples, model, store and budget."""

import os
import re
from pathlib import Path

from fedkeep.agent.assembly import AgentConfig, parse_config
from fedkeep.core.errors import ConfigError
from fedkeep.tables import Table, merged, read_toml

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_SHARED = ("agent", "metrics")
"""Tables of the process; all others belong to a stream, or are the default of each."""


def read_streams(path: Path) -> tuple[AgentConfig, ...]:
    """Read a file and check it; without a `[[stream]]` it is the configuration of one."""
    return parse_streams(read_toml(path))


def parse_streams(table: Table) -> tuple[AgentConfig, ...]:
    """Check the tables of a configuration, one stream after the other.

    Tables beside `[[stream]]` are the defaults of all streams; `[agent]` and `[metrics]` are the
    process's.

    Examples
    --------
    >>> sizes = [{"name": name, "samples": {"shape": [2], "labels": 2}} for name in ("a", "b")]
    >>> [(config.stream, config.store.path) for config in parse_streams({"stream": sizes})]
    [('a', 'a.store'), ('b', 'b.store')]
    """
    if "stream" not in table:
        return (parse_config(table),)
    streams = table["stream"]
    if not isinstance(streams, list) or not all(isinstance(one, dict) for one in streams):
        raise ConfigError("streams are written as [[stream]], with two brackets")
    if not streams:
        raise ConfigError("there is no [[stream]] in the list 'stream'")
    if "source" in table:
        raise ConfigError("[[source]] belongs to a stream here: write it as [[stream.source]]")
    defaults = {key: value for key, value in table.items() if key != "stream"}
    configs = tuple(_parse(one, defaults, number) for number, one in enumerate(streams))
    for kind, values in {
        "name": [config.stream for config in configs],
        "[stream.store] path": [os.path.realpath(config.store.path) for config in configs],
    }.items():
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"two streams have the same {kind}, {twice}: give each its own")
    return configs


def _parse(stream: Table, defaults: Table, number: int) -> AgentConfig:
    """Return the configuration of one stream over the defaults of all."""
    own = dict(stream)
    name = own.pop("name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"'stream[{number}].name' must be letters, digits, '.', '-' or '_', at most 64 of "
            f"them, not {name!r}"
        )
    for key in _SHARED:
        if key in own:
            raise ConfigError(f"[{key}] is the process's: write it outside of stream '{name}'")
    table = merged(merged({"store": {"path": f"{name}.store"}}, defaults), own)
    try:
        return parse_config(table, stream=name)
    except ConfigError as error:
        raise ConfigError(f"stream '{name}': {error}") from error
