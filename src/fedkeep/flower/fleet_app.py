"""The Flower app of a `fleet.toml`: written where it is served, so that a fleet of agents needs no app of its own."""

from __future__ import annotations

import json
from pathlib import Path

from fedkeep.config import Table, merged, read_toml
from fedkeep.fleet.specification import parse_fleet
from fedkeep.flower.server_app import config_of, tables_of
from fedkeep.presets import DEFAULT, DEFAULT_POLICY

_PYPROJECT = """\
[project]
name = "fedkeep-fleet"
version = "1.0.0"
description = "The fleet of a fleet.toml."
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["fedkeep_fleet"]

[tool.flwr.app]
publisher = "fedkeep"

[tool.flwr.app.components]
serverapp = "fedkeep_fleet.server_app:app"
clientapp = "fedkeep_fleet.client_app:app"

[tool.flwr.app.config]
"""
_MODULES = {
    "__init__": '"""Written by fedkeep."""\n',
    "client_app": "from fedkeep.flower.agent_device import make_agent_app\n\napp = make_agent_app()\n",
    "server_app": "from fedkeep.flower.server_app import make_server_app\n\napp = make_server_app()\n",
}
_SET_BY_SERVE: Table = {
    "preset": DEFAULT,
    "policy": {"name": DEFAULT_POLICY},
    "state": {"url": "", "run": "default", "resume": False},
    "records": {"directory": ""},
}
"""Flower lets a run change only what its app has: these `fedkeep serve` sets, and devices read the first two."""


def takes_records(app: Path) -> bool:
    """Whether a record can be written of an app's runs: of a specification's, and of apps that name the table."""
    if app.is_file():
        return True
    tool = read_toml(app / "pyproject.toml").get("tool", {})
    return "records" in tool.get("flwr", {}).get("app", {}).get("config", {})


def write_app(specification: Path, directory: Path, changes: Table) -> Path:
    """Writes the app of a `fleet.toml` with these changes into a directory, and returns it; mistakes are told first."""
    tables = merged(merged(_SET_BY_SERVE, read_toml(specification)), tables_of(config_of(changes)))
    parse_fleet(tables)
    package = directory / "fedkeep_fleet"
    package.mkdir(parents=True, exist_ok=True)
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in config_of(tables).items())
    (directory / "pyproject.toml").write_text(_PYPROJECT + "".join(lines), encoding="utf-8")
    for name, text in _MODULES.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    return directory
