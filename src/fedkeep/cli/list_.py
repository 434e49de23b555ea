"""`fedkeep list`: what may stand in an experiment file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

import fedkeep.registry
from fedkeep.core.coordination import COORDINATORS
from fedkeep.core.policy import POLICIES
from fedkeep.data import TASKS
from fedkeep.learn.models import DENSE, TORCH
from fedkeep.presets import PRESETS

assert fedkeep.registry  # importing it registers the policies


def list_() -> None:
    """List what may stand in an experiment.

    The policies, tasks, coordinators, models and presets known here.
    """
    table = Table(box=None, show_header=False, pad_edge=False)
    for kind, members in (("policy", POLICIES), ("task", TASKS), ("coordinator", COORDINATORS)):
        _add(table, kind, {name: _first_sentence(cls) for name, cls in members.items()})
    _add(table, "model", {**dict.fromkeys(DENSE, "numpy alone"), **dict.fromkeys(TORCH, "needs the torch extra")})
    _add(table, "preset", dict.fromkeys(PRESETS, ""))
    Console().print(table)


def _add(table: Table, kind: str, members: Mapping[str, str]) -> None:
    for name in sorted(members):
        table.add_row(Text(kind), Text(name, style="bold"), Text(members[name]))


def _first_sentence(cls: type) -> str:
    text = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    return " ".join(text.split())
