"""`fedkeep explain` and `fedkeep list`: what may stand in an experiment, from the classes that own the keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedkeep.core.errors import ConfigError
from fedkeep.core.names import did_you_mean
from fedkeep.keys import Key, about, keys_of, summary, toml
from fedkeep.learn.models import DENSE, TORCH
from fedkeep.loading import find_component
from fedkeep.presets import PRESETS
from fedkeep.registry import COMPONENTS
from fedkeep.sim.experiment import TABLES

_MODELS = {**dict.fromkeys(DENSE, "numpy alone"), **dict.fromkeys(TORCH, "needs the torch extra")}
_OTHERS = {
    "base": "Another experiment file, or a list of files, whose tables come first.",
    "label": "What tables and legends call the method.",
    "methods": "A table a method, of what differs in it: [methods.NAME].",
    "model": "Overrides of the task's model: name, last_layers (how many are valued), its factory's arguments.",
    "preset": f"Defaults by name: {', '.join(PRESETS)}.",
    "seed": "What all randomness follows from: data split, first model, participants, draws.",
    "sweep": 'Lists of values to run in all combinations: seed = [0, 1], "storage.capacity" = [5, 10].',
}
"""Keys of an experiment that no class owns."""


def list_(
    name: Annotated[str | None, typer.Argument(help="A policy, task, coordinator ...: all that it takes.")] = None,
) -> None:
    """List what may stand in an experiment.

    The policies, tasks, coordinators, partitions, models and presets known here; with a name, its keys and defaults.
    """
    console = Console()
    if name is None:
        console.print(_overview())
        return
    shown = list(_components(name))
    if not shown:
        raise ConfigError(f"nothing is called '{name}': {did_you_mean(name, _names())}")
    console.print(*shown, sep="\n")


def explain(
    key: Annotated[str, typer.Argument(help="A key or a table of an experiment, e.g. storage.capacity or storage.")],
) -> None:
    """Say what a key of an experiment does.

    What it takes, its default, what the presets say, and where the paper has it.
    """
    table, _, name = key.partition(".")
    if table not in {*TABLES, *COMPONENTS, *_OTHERS}:
        raise ConfigError(
            f"no table of an experiment is called '{table}': {did_you_mean(table, [*TABLES, *COMPONENTS])}"
        )
    console = Console()
    if table in _OTHERS:
        console.print(Text(table, style="bold"), Padding(Text(_OTHERS[table]), (0, 0, 0, 2)), sep="\n")
    elif not name:
        console.print(*_table(table), sep="\n")
    else:
        console.print(*_key(table, name), sep="\n")


def _overview() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for kind, members in COMPONENTS.items():
        _add(table, kind, {name: summary(cls) for name, cls in members.items()})
    _add(table, "model", _MODELS)
    _add(table, "preset", dict.fromkeys(PRESETS, ""))
    _add(table, "table", {name: summary(cls) for name, cls in TABLES.items()})
    return table


def _add(table: Table, kind: str, members: dict[str, str]) -> None:
    for name in sorted(members):
        table.add_row(Text(kind), Text(name, style="bold"), Text(members[name]))


def _names() -> list[str]:
    return [name for members in COMPONENTS.values() for name in members] + [*_MODELS, *PRESETS]


def _components(name: str) -> Iterator[RenderableType]:
    """All that goes by a name: a policy may be called like a partition."""
    for kind, members in COMPONENTS.items():
        if name in members or ":" in name:
            found = find_component(members, name)
            yield _described(f'{kind} = {{ name = "{name}" }}', found, _said_of_policy(kind, name))
            if ":" in name:
                return
    if name in _MODELS:
        yield _described(f'model = {{ name = "{name}" }}', None, [f"Needs: {_MODELS[name]}."])
    if name in PRESETS:
        yield _described(f'preset = "{name}"', None, list(_said(name)))


def _table(table: str) -> Iterator[RenderableType]:
    if table in TABLES:
        yield _described(f"[{table}]", TABLES[table], list(_said_of(table)))
        return
    members = {name: summary(cls) for name, cls in COMPONENTS[table].items()}
    overview = Table(box=None, show_header=False, pad_edge=False)
    _add(overview, table, members)
    yield Group(
        overview, Text(f"`fedkeep list NAME` has the keys of one; your own goes by module:Class ({table}.name).")
    )


def _key(table: str, name: str) -> Iterator[RenderableType]:
    """The key as each class has it that may own it."""
    owners = {table: TABLES[table]} if table in TABLES else dict(COMPONENTS[table])
    found = [(owner, key) for owner, cls in owners.items() for key in keys_of(cls) if key.name == name]
    if not found:
        known = {key.name for cls in owners.values() for key in keys_of(cls)}
        raise ConfigError(f"'{table}' has no key '{name}': {did_you_mean(name, known)}")
    for owner, key in found:
        of = "" if owner == table else f" of {owner}"
        body = [Text(f"{table}.{name}{of}", style="bold"), *_lines(key)]
        body += [Text(f"  {said}") for said in _said_of(table, name)]
        yield Group(*body)
    if table in TABLES:
        yield Padding(Text(about(TABLES[table]), style="dim"), (1, 0, 0, 2))


def _lines(key: Key) -> list[Text]:
    lines = [f"takes {key.takes}", f"default: {key.default}", key.text]
    return [Text(f"  {line}") for line in lines if line]


def _described(title: str, cls: type[Any] | None, said: Sequence[str]) -> Group:
    parts: list[RenderableType] = [Text(title, style="bold")]
    if cls is not None:
        parts.append(Padding(Text(about(cls)), (0, 0, 0, 2)))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for key in keys_of(cls):
            table.add_row(Text(key.name, style="bold"), Text(key.default), Text(f"{key.text} ({key.takes})".strip()))
        parts.append(Padding(table, (1, 0, 0, 2)))
    return Group(*parts, *(Text(f"  {sentence}") for sentence in said))


def _said_of_policy(kind: str, name: str) -> list[str]:
    if kind != "policy":
        return []
    return [f"Preset {preset}: {_flat(said[name])}." for preset, said in PRESETS.items() if name in said]


def _said_of(table: str, key: str | None = None) -> Iterator[str]:
    """What presets say of a table or of one key of it."""
    for preset, said in PRESETS.items():
        for policy, tables in said.items():
            values = {k: v for k, v in tables.get(table, {}).items() if key in (None, k)}
            if values:
                of = "every policy" if policy == "*" else policy
                yield f"Preset {preset}, {of}: {_flat({table: values})}."


def _said(preset: str) -> Iterator[str]:
    for policy, tables in PRESETS[preset].items():
        yield f"{'every policy' if policy == '*' else policy}: {_flat(tables)}."


def _flat(tables: dict[str, Any]) -> str:
    return ", ".join(f"{table}.{key} = {toml(value)}" for table, keys in tables.items() for key, value in keys.items())
