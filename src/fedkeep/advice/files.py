"""The files that an advice leaves: the experiment that should confirm it, and configurations that use it."""

from __future__ import annotations

from pathlib import Path

from fedkeep.advice.panel import Panel
from fedkeep.config import Table
from fedkeep.data import Federation
from fedkeep.keys import toml

_CONFIRMING = 5
"""Seeds of the experiment that should confirm an advice."""


def write_files(
    folder: Path, panel: Panel, method: str, data: Federation, sample_bytes: int, seen_seeds: int
) -> list[Path]:
    """Writes `experiment.toml` and `agent.toml`; returns where they are."""
    experiment = folder / "experiment.toml"
    experiment.write_text(
        "# Confirms the advice on seeds that it has not seen: fedkeep run experiment.toml\n"
        + as_toml(panel.experiment(_CONFIRMING, seen_seeds)),
        encoding="utf-8",
    )
    agent = folder / "agent.toml"
    agent.write_text(
        "# What a device runs: fedkeep agent run agent.toml\n"
        + as_toml(agent_table(panel, method, data, sample_bytes))
        + '\n[[source]]\nkind = "lines"  # JSON lines on standard input; see docs/agent.md\n',
        encoding="utf-8",
    )
    return [experiment, agent]


def agent_table(panel: Panel, method: str, data: Federation, sample_bytes: int) -> Table:
    """The device's configuration for a method."""
    said = panel.methods[method]
    policy = said["policy"]
    return {
        "samples": {"shape": list(data.sample_shape), "labels": data.labels},
        "model": {"name": data.model.name, **data.model.options},
        "policy": policy,
        "store": {"path": "samples.store", "budget": _budget(panel.capacity, sample_bytes)},
        "agent": {"socket": "agent.sock", "capacity": panel.capacity},
    }


def _budget(capacity: int, sample_bytes: int) -> int:
    """Room for the samples, the model and the store's own order, rounded up."""
    return max(1_000_000, 4 * capacity * (sample_bytes + 512))


def as_toml(table: Table) -> str:
    """A table of tables as a TOML file: plain values first, one line a table."""
    plain = [
        f"{key} = {toml(value)}" for key, value in table.items() if not isinstance(value, dict) or key not in _SECTIONS
    ]
    lines = [line for line in plain if not line.endswith("= {}")]
    for key in _SECTIONS:
        for name, value in table.get(key, {}).items():
            quoted = name if name.replace("-", "").isalnum() else f'"{name}"'
            lines.append(f"{key}.{quoted} = {toml(value)}")
    return "\n".join(lines) + "\n"


_SECTIONS = ("methods", "sweep")
