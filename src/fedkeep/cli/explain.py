"""`fedkeep explain` and `fedkeep list`: the keys of an experiment, from the owning classes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedkeep.config.components import COMPONENTS
from fedkeep.config.experiment import TABLES
from fedkeep.config.methods import DEFAULT_METHOD, METHODS
from fedkeep.config.presets import PRESETS
from fedkeep.config.reference import about, keys_of, toml
from fedkeep.core.errors import ConfigError
from fedkeep.core.registry import Registry, did_you_mean
from fedkeep.learn.models import DENSE, FEDBOOST, TORCH
from fedkeep.loading import find_component

_MODELS = {
    **dict.fromkeys([*DENSE, FEDBOOST], "numpy alone"),
    **dict.fromkeys(TORCH, "needs the torch extra"),
}
_OTHERS = {
    "base": "Another experiment file, or a list of files, whose tables come first.",
    "label": "What tables and legends call the method.",
    "methods": (
        "Registered methods by name, methods = [NAME, ...] (`fedkeep list` has them), or a table a "
        "method, of what differs in it: [methods.NAME]."
    ),
    "model": (
        "Overrides of the task's model: name, last_layers (how many are valued), "
        "its factory's arguments."
    ),
    "preset": f"Defaults by name: {', '.join(PRESETS)}.",
    "seed": "What all randomness follows from: data split, first model, participants, draws.",
    "sweep": (
        'Lists of values to run in all combinations: seed = [0, 1], "storage.capacity" = [5, 10].'
    ),
}
"""Keys of an experiment that no class owns."""


def list_(
    name: Annotated[
        str | None, typer.Argument(help="A policy, task, coordinator ...: all that it takes.")
    ] = None,
) -> None:
    """List what may stand in an experiment.

    The methods, policies, tasks, coordinators, partitions, models and presets known here; with a
    name, its keys and defaults, or what a method is made of.
    """
    known = {"method": {name: method.summary for name, method in METHODS.items()}}
    known |= {kind: _summaries(members) for kind, members in COMPONENTS.items()}
    known |= {"model": _MODELS, "preset": dict.fromkeys(PRESETS, "")}
    if name is None:
        Console().print(_listed(known | {"table": _summaries(TABLES)}))
        return
    shown = list(_components(name))
    if not shown:
        names = dict.fromkeys(name for members in known.values() for name in members)
        raise ConfigError(f"nothing is called '{name}': {did_you_mean(name, names)}")
    Console().print(*shown, sep="\n")


def explain(
    key: Annotated[
        str,
        typer.Argument(help="A key or a table of an experiment, e.g. storage.capacity or storage."),
    ],
) -> None:
    """Say what a key of an experiment does.

    What it takes, its default, what the presets say, and where the paper has it.
    """
    table, _, name = key.partition(".")
    if table in _OTHERS:
        shown: Iterable[RenderableType] = [_described(table, None, [_OTHERS[table]])]
    elif table not in {*TABLES, *COMPONENTS}:
        hint = did_you_mean(table, [*TABLES, *COMPONENTS])
        raise ConfigError(f"no table of an experiment is called '{table}': {hint}")
    elif name:
        shown = _key(table, name)
    elif table in TABLES:
        shown = [_described(f"[{table}]", TABLES[table], _said(table=table))]
    else:
        own = (
            "`fedkeep list NAME` has the keys of one; "
            f"your own goes by module:Class ({table}.name)."
        )
        shown = [_listed({table: _summaries(COMPONENTS[table])}), Text(own)]
    Console().print(*shown, sep="\n")


def _summaries(members: Mapping[str, type[Any]]) -> dict[str, str]:
    """Return the first paragraph of each docstring."""
    return {name: about(cls).partition("\n\n")[0] for name, cls in members.items()}


def _listed(kinds: Mapping[str, Mapping[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for kind, members in kinds.items():
        for name in members if kind == "method" else sorted(members):
            table.add_row(Text(kind), Text(name, style="bold"), Text(members[name]))
    return table


def _components(name: str) -> Iterator[RenderableType]:
    """All that goes by a name: a policy may be called like a method or a partition."""
    if ":" in name:
        own: Registry[type] = Registry("class")
        yield _described(f'name = "{name}"', find_component(own, name), [])
    for kind, members in COMPONENTS.items():
        if name in members:
            sentences = _said(policy=name) if kind == "policy" else []
            yield _described(f'{kind} = {{ name = "{name}" }}', members[name], sentences)
    if name in _MODELS:
        yield _described(f'model = {{ name = "{name}" }}', None, [f"Needs: {_MODELS[name]}."])
    if name in PRESETS:
        yield _described(f'preset = "{name}"', None, _said(preset=name))
    if name in {*METHODS, "default"}:
        method = METHODS[DEFAULT_METHOD if name == "default" else name]
        tables = (f"{key} = {toml(value)}" for key, value in method.table.items())
        yield _described(f'methods = ["{name}"]', None, [method.summary, *tables])


def _key(table: str, name: str) -> Iterator[RenderableType]:
    """List the key as each class has it that may own it."""
    owners = {table: TABLES[table]} if table in TABLES else dict(COMPONENTS[table])
    found = [
        (owner, key) for owner, cls in owners.items() for key in keys_of(cls) if key.name == name
    ]
    if not found:
        known = {key.name for cls in owners.values() for key in keys_of(cls)}
        raise ConfigError(f"'{table}' has no key '{name}': {did_you_mean(name, known)}")
    for owner, key in found:
        of = "" if owner == table else f" of {owner}"
        lines = [
            f"takes {key.takes}",
            f"default: {key.default}",
            key.text,
            *_said(table=table, key=name),
        ]
        yield _described(f"{table}.{name}{of}", None, filter(None, lines))
    if table in TABLES:
        yield Padding(Text(about(TABLES[table]), style="dim"), (1, 0, 0, 2))


def _described(title: str, cls: type[Any] | None, sentences: Iterable[str]) -> Group:
    parts: list[RenderableType] = [Text(title, style="bold")]
    if cls is not None:
        parts.append(Padding(Text(about(cls)), (0, 0, 0, 2)))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for key in keys_of(cls):
            table.add_row(
                Text(key.name, style="bold"),
                Text(key.default),
                Text(f"{key.text} ({key.takes})".strip()),
            )
        parts.append(Padding(table, (1, 0, 0, 2)))
    return Group(*parts, *(Padding(Text(sentence), (0, 0, 0, 2)) for sentence in sentences))


def _said(**wanted: str) -> list[str]:
    """List what presets set: one of them or all, of a policy, a table, a key or everything."""
    found: dict[str, list[str]] = {}
    for preset, policies in PRESETS.items():
        for policy, tables in policies.items():
            of = f"Preset {preset}, {'every policy' if policy == '*' else policy}"
            for table, key, value in (
                (t, k, v) for t, keys in tables.items() for k, v in keys.items()
            ):
                if (
                    wanted.items()
                    <= {"preset": preset, "policy": policy, "table": table, "key": key}.items()
                ):
                    found.setdefault(of, []).append(f"{table}.{key} = {toml(value)}")
    return [f"{of}: {', '.join(values)}." for of, values in found.items()]
