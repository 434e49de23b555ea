"""The ServerApp of a fleet: options from Flower's run config, and the app of a `fleet.toml`.

That app is one file, written where it is served: its components are `app` here and in `client_app`,
for Flower takes them from wherever Python finds them. So a fleet of agents needs no app of its own.
"""

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from flwr.app import Context
from flwr.app.user_config import UserConfig
from flwr.serverapp import Grid, ServerApp

from fedkeep.config.agreement import agreement_of
from fedkeep.config.aliases import current
from fedkeep.config.method import FleetSpec, fleet_tables, parse_fleet, table_of
from fedkeep.config.options import MetricsOptions
from fedkeep.config.presets import DEFAULT, DEFAULT_POLICY
from fedkeep.core.aggregation import Aggregator
from fedkeep.core.errors import ConfigError
from fedkeep.core.regions import region_term
from fedkeep.core.registry import did_you_mean
from fedkeep.core.server import Server
from fedkeep.core.types import Vector
from fedkeep.flower.recording import FleetRecorder, FleetRecordOptions, header_of
from fedkeep.flower.rounds import RoundOptions, ServerMetrics
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.strategy import FedkeepStrategy, require_same
from fedkeep.keyholder.service import KeyHolderOptions, RemotePlanner
from fedkeep.privacy.options import PrivacyOptions, refuse_conflicts
from fedkeep.privacy.secagg.server import SecureAggregationServer
from fedkeep.protocol.wire import from_array
from fedkeep.records import Header
from fedkeep.tables import Table, build, flat, merged, put, read_toml

log = logging.getLogger("fedkeep.flower")

_PYPROJECT = """\
[project]
name = "fedkeep-fleet"
version = "1.0.0"
description = "The fleet of a fleet.toml."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedkeep"

[tool.flwr.app.components]
serverapp = "fedkeep.flower.server_app:app"
clientapp = "fedkeep.flower.client_app:app"

[tool.flwr.app.config]
"""
_ALWAYS_SAID: Table = {
    "preset": DEFAULT,
    "policy": {"name": DEFAULT_POLICY},
    "state": {"resume": False},
}
"""Devices read the first two; Flower lets a run change only keys its app has, as the third."""


@dataclass(frozen=True)
class StateOptions:
    """`state`: where the server's memory lies."""

    url: str = ""
    """A file, `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`; empty: no state is kept."""
    run: str = "default"
    """The name under which a run is saved and resumed."""
    resume: bool = False
    """Continue the saved run of that name."""


_DEPLOYMENT: dict[str, type[Any]] = {
    "rounds": RoundOptions,
    "state": StateOptions,
    "records": FleetRecordOptions,
    "metrics": MetricsOptions,
    "keyholder": KeyHolderOptions,
    "privacy": PrivacyOptions,
}


def tables_of(run_config: UserConfig) -> Table:
    """Return Flower's flat run config as tables: `rounds.deadline` is `deadline` of `rounds`.

    Dashes become underscores.

    Flower knows no lists: one is written as text.

    >>> tables_of({"rounds.min-devices": 2, "samples.shape": "[1, 28, 28]"})
    {'rounds': {'min_devices': 2}, 'samples': {'shape': [1, 28, 28]}}
    """
    tables: Table = {}
    for key, value in run_config.items():
        listed = isinstance(value, str) and value.startswith("[")
        try:
            put(tables, key.replace("-", "_"), msgspec.json.decode(str(value)) if listed else value)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"'{key}' cannot be {value!r}: a list is written as '[1, 2]'"
            ) from error
    return current(tables)


def config_of(tables: Table) -> UserConfig:
    """Tables as Flower's flat run config: what `tables_of` reads."""
    return {
        k: msgspec.json.encode(v).decode() if isinstance(v, list) else v for k, v in flat(tables)
    }


def fleet_of(run_config: UserConfig) -> FleetSpec:
    """Return the specification in a run config, whose other keys are the app's own."""
    return parse_fleet(fleet_tables(tables_of(run_config)))


def open_fleet(run_config: UserConfig) -> FedkeepStrategy:
    """Return the strategy of the fleet that the run config specifies.

    >>> config = {"samples.shape": "[30]", "samples.labels": 10, "model.name": "softmax"}
    >>> strategy = open_fleet(config)
    >>> strategy.server.round, len(strategy.server.model), strategy.server.regions
    (0, 310, 10)
    """
    spec = fleet_of(run_config)
    return open_strategy(
        spec.server(),
        run_config,
        header_of(spec),
        agreement=agreement_of(spec, region_term(spec.regions), spec.samples.numbers),
        specification=fixed_terms(spec),
        participation=spec.train.participation,
    )


def fixed_terms(spec: FleetSpec) -> dict[str, str]:
    """Return what cannot change while a run goes on: the form of samples, model and gradients.

    >>> config = {"samples": {"shape": [30], "labels": 10}, "model": {"name": "softmax"}}
    >>> fixed_terms(parse_fleet(config))["samples.labels"]
    '10'
    """
    model = {f"model.{key}": str(value) for key, value in sorted(spec.model.items())}
    return {
        "samples.shape": str(list(spec.samples.shape)),
        "samples.labels": str(spec.samples.count),
        **_terms_of_numbers(spec),
        **model,
        "parameters": str(spec.learner.size),
        **agreement_of(spec, region_term(spec.regions), spec.samples.numbers),
    }


def _terms_of_numbers(spec: FleetSpec) -> dict[str, str]:
    """Return what targets look like that are numbers; nothing for labels."""
    numbers = spec.samples.numbers
    if numbers is None:
        return {}
    return {"samples.edges": str(list(numbers.edges)), "samples.width": str(numbers.width)}


def refuse_changes(spec: FleetSpec, url: str, run: str, anew: str) -> None:
    """Raise if a saved run was begun with another form of samples, model or gradients.

    Parameters
    ----------
    spec : FleetSpec
        The fleet as it is specified now.
    url, run : str
        Where its state is saved, and under which name. Nothing is made there.
    anew : str
        What to do to begin anew, as the end of a sentence.

    Raises
    ------
    ConfigError
        With the keys that differ, and both values.
    """
    if "://" not in url and not Path(url).exists():
        return
    saved = StateStore(url, run).saved("specification")
    if saved is not None:
        require_same(from_array(saved, dict[str, str]), fixed_terms(spec), anew)


def refuse_saved_changes(app: Path, config: UserConfig, anew: str) -> None:
    """Raise if the run that an app's config names is saved with another specification.

    Parameters
    ----------
    app : Path
        The folder that is served; an app of tables of its own is not checked.
    config : UserConfig
        What the run sets.
    anew : str
        What to do to begin anew, as the end of a sentence.
    """
    table = read_toml(app / "pyproject.toml")
    for key in ("tool", "flwr", "app", "config"):
        table = table.get(key, {})
    tables = tables_of(dict(flat(table)) | config)
    state = build(StateOptions, table_of(tables, "state"), "state")
    if isinstance(table.get("samples"), dict) and state.url:
        refuse_changes(parse_fleet(fleet_tables(tables)), state.url, state.run, anew)


def check_specification(path: Path) -> FleetSpec:
    """Return what a fleet.toml specifies; raise where anything in it is wrong."""
    tables = merged(_ALWAYS_SAID, read_toml(path))
    spec = parse_fleet(tables)
    _deployment(tables, spec.aggregation)
    spec.server()
    return spec


def show_log() -> None:
    """Show what fedkeep logs, without the root logger: that repeats all of Flower's."""
    ours = logging.getLogger("fedkeep")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
        ours.handlers[0].setFormatter(logging.Formatter("fedkeep: %(message)s"))


def play(grid: Grid, run_config: UserConfig) -> Vector:
    """Plays the fleet's rounds, says how each went, and returns the model."""
    show_log()
    strategy = open_fleet(run_config)
    for _ in strategy.rounds(grid, fleet_of(run_config).train.rounds):
        pass
    log.info("done: %d rounds", strategy.server.round)
    return strategy.server.model


def open_strategy(
    server: Server,
    run_config: UserConfig,
    header: Header | None = None,
    agreement: Mapping[str, str] | None = None,
    specification: Mapping[str, str] | None = None,
    **rounds: Any,
) -> FedkeepStrategy:
    """Return the strategy that the run config's tables describe; a header begins a record.

    Keywords are keys of `rounds` that the app knows better than its run config.
    """
    options = _deployment(tables_of(run_config), server.aggregation)
    privacy, state, planner = options["privacy"], options["state"], None
    if privacy.profile_protection == "homomorphic":
        raise ConfigError(
            "privacy.profiles = 'homomorphic' is for `fedkeep run`: set 'sealed' for a fleet"
        )
    if privacy.profile_protection == "sealed":
        if not server.limits.enabled:
            raise ConfigError(
                "privacy.encrypted_profiles needs limits: the key-holder caps rates and "
                "capacities; remove limits.enabled = false"
            )
        planner = RemotePlanner(options["keyholder"].client(), server.coordinator)
        server.discard_plan()
    store = StateStore(state.url, state.run) if state.url else None
    sums = (
        SecureAggregationServer(server, privacy, server.gradient_size)
        if privacy.secure_aggregation
        else None
    )
    strategy = FedkeepStrategy(
        server, replace(options["rounds"], **rounds), store, sums, planner,
        agreement=agreement, specification=specification,
    )  # fmt: skip
    if state.resume:
        strategy.resume()
    elif store is not None and store.load() is not None:
        raise ConfigError(
            f"run '{state.run}' is saved already: set state.resume=true, or another state.run"
        )
    if header is not None and (directory := options["records"].directory):
        strategy.recorder = FleetRecorder(Path(directory) / f"{state.run}.jsonl", header)
    if options["metrics"].port:
        strategy.metrics = ServerMetrics()
        strategy.metrics.serve(options["metrics"])
    return strategy


def _deployment(tables: Table, aggregation: Aggregator) -> dict[str, Any]:
    """Return the options of how a fleet is run; raise where one is wrong or excludes another."""
    options = {
        key: build(options, table_of(tables, key), key) for key, options in _DEPLOYMENT.items()
    }
    if "participation" in table_of(tables, "rounds"):
        raise ConfigError(
            "set 'train.participation', not 'rounds.participation': it is part of what a fleet does"
        )
    privacy = options["privacy"]
    refuse_conflicts(privacy, aggregation)
    silent = privacy.on_exhausted == "absent" or "model" in privacy.protect
    if options["rounds"].deterministic and privacy.epsilon is not None and silent:
        raise ConfigError(
            "a device whose privacy budget is spent stays away, and 'rounds.deterministic' would "
            "wait for it for ever: set rounds.deterministic=false, or protect the estimator only, "
            'with when-spent="without-estimator"'
        )
    if options["state"].resume and not options["state"].url:
        raise ConfigError("'state.resume' needs 'state.url': where the saved run lies")
    return options


def make_app(
    source: Path, directory: Path, changes: Table, defaults: Table
) -> tuple[Path, UserConfig]:
    """Return the app that serves a `fleet.toml` or an app's folder, and what its run sets.

    The app of a `fleet.toml` is written into the directory. In a folder Flower lets a run set only
    what the app's tables name: `changes` must be there, `defaults` are set where the table is.
    """
    if source.is_file():
        config: UserConfig = {}
        tables = merged(
            merged(_ALWAYS_SAID, read_toml(source)), tables_of(config_of(merged(defaults, changes)))
        )
    else:
        table = read_toml(source / "pyproject.toml")
        for key in ("tool", "flwr", "app", "config"):
            table = table.get(key, {})
        known, config = (
            dict(flat(table)),
            config_of(merged({k: v for k, v in defaults.items() if k in table}, changes)),
        )
        for key in (*config, "state.resume"):
            if key not in known:
                raise ConfigError(
                    f"the app in {source} has no key '{key}': {did_you_mean(key, known)}"
                )
        if not isinstance(table.get("samples"), dict):  # an app that only has its own tables
            return source, config
        tables = fleet_tables(tables_of(known | config))
    sys.path.insert(0, str(source))  # where Flower finds what an app names
    try:
        spec = parse_fleet(tables)
        _deployment(tables, spec.aggregation)
        spec.server()
    finally:
        sys.path.remove(str(source))
    if source.is_dir():
        return source, config
    directory.mkdir(parents=True, exist_ok=True)
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in config_of(tables).items())
    (directory / "pyproject.toml").write_text(_PYPROJECT + "".join(lines), encoding="utf-8")
    return directory, config


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the fleet: what Flower calls."""
    play(grid, context.run_config)
