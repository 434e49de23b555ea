"""The files that an advice leaves: the experiment that should confirm it, and configurations that use it."""

from pathlib import Path

from fedkeep.advice.panel import Panel
from fedkeep.agent.assembly import budget_for, parse_config
from fedkeep.config import Table, merged
from fedkeep.data import Federation
from fedkeep.keys import bare, toml

_SECTIONS = ("methods", "sweep")
_CONFIRMING = 5
"""Seeds of the experiment that should confirm an advice."""


def write_files(folder: Path, panel: Panel, method: str, data: Federation, first_seed: int) -> list[Path]:
    """Writes `experiment.toml`, `agent.toml` and `fleet.toml`; returns where they are."""
    source = '\n[[source]]\nkind = "lines"  # JSON lines on standard input; see docs/agent.md\n'
    texts = {
        "experiment.toml": "# Confirms the advice on seeds that it has not seen: fedkeep run experiment.toml\n"
        + as_toml(panel.experiment(_CONFIRMING, first_seed)),
        "agent.toml": "# What a device runs: fedkeep agent run agent.toml\n"
        + as_toml(agent_table(panel, method, data))
        + source,
        "fleet.toml": "# What the server runs: fedkeep serve fleet.toml\n" + as_toml(fleet_table(panel, method, data)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def agent_table(panel: Panel, method: str, data: Federation) -> Table:
    """The device's configuration for a method: a file of as few bytes as hold its samples."""
    said = {key: table for key, table in panel.methods[method].items() if key in ("policy", "weights", "gist")}
    table = {**_form(data), **said, "store": {"path": "samples.store"}, "agent": {"socket": "agent.sock"}}
    budget = budget_for(parse_config(table), panel.slots(method))
    return merged(table, {"store": {"budget": budget}})


def fleet_table(panel: Panel, method: str, data: Federation) -> Table:
    """The server's configuration for a method."""
    train = {**panel.shared()["train"], "learning_rate": panel.rates[method]}
    fleet = {**_form(data), **panel.methods[method], "storage": {"capacity": panel.slots(method)}, "train": train}
    fleet["samples"]["names"] = list(data.label_names)
    return fleet


def _form(data: Federation) -> Table:
    return {
        "samples": {"shape": list(data.sample_shape), "labels": data.labels},
        "model": {"name": data.model.name, **data.model.options},
    }


def as_toml(table: Table) -> str:
    """A table of tables as a TOML file, one line a table; methods and what is swept have a line each.

    >>> print(as_toml({"train": {"rounds": 9}, "stream": {}, "sweep": {"seed": [3, 4]}}), end="")
    train = { rounds = 9 }
    sweep.seed = [3, 4]
    """
    plain = {key: value for key, value in table.items() if key not in _SECTIONS and value != {}}
    spread = {f"{key}.{bare(name)}": value for key in _SECTIONS for name, value in table.get(key, {}).items()}
    return "".join(f"{key} = {toml(value)}\n" for key, value in (plain | spread).items())
