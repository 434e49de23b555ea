"""The hash of an experiment: of a frozen form, so that committed results keep theirs."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab.curves import Curves
from lab.suite import read_suite

from fedkeep.config import canonical
from fedkeep.config.experiment import resolve
from fedkeep.tables import merged

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FROZEN = [
    json.loads(line)
    for line in Path(__file__).with_name("hashes_v1.jsonl").read_text(encoding="utf-8").splitlines()
]
"""Tables in the words of version 1, each key off its default, with the hashes of that time."""
VERSION_1_DEFAULTS = {"train": {"learning_rate": 1e-3}}
"""Defaults of that time which depend on the task today."""


def test_every_committed_curve_has_the_hash_of_the_run_that_its_suite_plans() -> None:
    directory = EXPERIMENTS / "results" / "curves"
    curves = Curves(directory)
    planned = set()
    for path in sorted((EXPERIMENTS / "suites").glob("*.toml")):
        suite = read_suite(path)
        planned |= {run.digest for stage in suite.stages for run in suite.wanted(stage, curves)}
    committed = {
        found
        for path in directory.glob("*.json")
        for found in re.findall(r'"config_hash":\s*"([0-9a-f]{16})"', path.read_text("utf-8"))
    }
    assert len(committed) > 5000
    assert committed <= planned


@pytest.mark.parametrize("row", FROZEN, ids=lambda row: json.dumps(row["table"])[:90])
def test_a_table_of_version_1_keeps_its_hash(row: dict[str, object]) -> None:
    table = row["table"]
    assert isinstance(table, dict)
    assert resolve(merged(VERSION_1_DEFAULTS, table)).digest() == row["hash"]


def test_the_frozen_hashes_tell_their_tables_apart() -> None:
    """Not all: some write out a default, or what a preset says."""
    assert len({row["hash"] for row in FROZEN}) > 0.8 * len(FROZEN)


@dataclass(frozen=True)
class _Later:
    """Options of a later release: a default has changed, and an option was added."""

    client_label: float = 0.5
    added: int = 1


@dataclass
class _Experiment:
    seed: int
    label: str
    model: dict[str, object]
    names: dict[str, str]


def test_a_changed_default_gets_another_hash_and_an_added_option_none() -> None:
    experiment = _Experiment(0, "ode", {}, {"policy": "ode"})

    def form(options: object) -> object:
        return canonical.canonical_form(experiment, {"weights": options})["weights"]

    assert form(_Later()) == {"client_label": 0.5}, "version 1 defaults to 0"
    assert form(_Later(client_label=0.0)) == {}
    assert form(_Later(client_label=0.0, added=2)) == {"added": 2}


def test_the_form_uses_the_keys_of_version_1() -> None:
    table = {
        "task": {"name": "demo"},
        "policy": {"name": "balanced-reservoir"},
        "gist": {"mode": "local", "drift_weight": 0.25},
        "storage": {"quotas": "hard"},
        "estimator": {"name": "round-mean"},
    }
    experiment = resolve(table)
    parts = {key: getattr(experiment, key) for key in ("gist", "storage", "estimator")}
    form = canonical.canonical_form(experiment, parts)
    assert form["names"] == {"task": "embedded", "policy": "draw", "coordinator": "none"}
    assert form["label"] == "draw"
    assert form["gist"] == {"name": "local", "kappa": 0.25}
    assert form["storage"] == {"quotas": "fixed", "after_use": "renew"}
    assert form["estimator"] == {"name": "participants"}
