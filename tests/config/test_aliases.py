"""Former words of a configuration: accepted, with a warning of one line that names the new one."""

import logging
from pathlib import Path

import pytest

from fedkeep.agent.assembly import parse_config
from fedkeep.config import aliases
from fedkeep.config.aliases import KEYS, RETIRED, VALUES, current
from fedkeep.config.experiment import expand, override, read_experiment, resolve
from fedkeep.config.method import parse_fleet
from fedkeep.core.errors import ConfigError
from fedkeep.tables import put


@pytest.fixture(autouse=True)
def _warned_anew() -> None:
    aliases._warn.cache_clear()


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_a_former_key_means_the_new_one(
    old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    table: dict[str, object] = {}
    expected: dict[str, object] = {}
    put(table, old, "value")
    put(expected, new, "value")
    assert current(table) == expected
    (warning,) = caplog.messages
    assert f"'{old}'" in warning
    assert f"'{new}'" in warning
    assert "\n" not in warning
    assert current({"methods": {"mine": table}}) == {"methods": {"mine": expected}}
    assert current({"sweep": {old: [1, 2]}}) == {"sweep": {new: [1, 2]}}
    assert len(caplog.messages) == 1, "once a process"


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [(key, old, new) for key, words in VALUES.items() for old, new in words.items()],
)
def test_a_former_value_means_the_new_one(key: str, old: str, new: str) -> None:
    table: dict[str, object] = {}
    expected: dict[str, object] = {}
    put(table, key, old)
    put(expected, key, new)
    assert current(table) == expected
    assert current({"sweep": table}) == {"sweep": {key: new}}
    assert current(expected) == expected


@pytest.mark.parametrize("key", RETIRED)
def test_a_retired_option_may_only_have_its_constant(key: str) -> None:
    table: dict[str, object] = {}
    put(table, key, RETIRED[key])
    assert current(table) == {}
    put(table, key, 7.5)
    with pytest.raises(ConfigError, match="remove it"):
        current(table)


def test_both_names_of_a_key_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"'gist.name' is the former name of 'gist.mode'"):
        current({"gist": {"name": "local", "mode": "shared"}})


def test_present_words_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    table = {
        "task": {"name": "demo"},
        "gist": {"mode": "local"},
        "coordinator": {"name": "none"},
        "methods": {"draw": {"policy": {"name": "fifo"}}},
    }
    with caplog.at_level(logging.DEBUG):
        assert current(table) == table
    assert not caplog.messages


def test_experiments_fleets_agents_settings_and_sweeps_take_former_words(tmp_path: Path) -> None:
    plain = {"task": {"name": "embedded"}, "gist": {"name": "local", "kappa": 0.25}}
    experiment = resolve(plain)
    assert experiment.names["task"] == "demo"
    assert (experiment.gist.mode, experiment.gist.drift_weight) == ("local", 0.25)
    swept = {**plain, "sweep": {"storage": {"quotas": ["targets", "fixed"]}}}
    assert [run.experiment.storage.quotas for run in expand(swept)] == ["soft", "hard"]
    assert override({"gist": {"mode": "none"}}, ["gist.name=local"]) == {"gist": {"mode": "local"}}
    form = {"samples": {"shape": [3], "labels": 2}}
    fleet = parse_fleet({**form, "privacy": {"secure_sum": True}})
    assert fleet.privacy.secure_aggregation
    agent = parse_config({**form, "policy": {"name": "draw"}, "after_use": {"name": "renew"}})
    assert (agent.method.policy_name, agent.method.storage.after_use) == (
        "balanced-reservoir",
        "evict_trained_first",
    )
    (tmp_path / "base.toml").write_text('gist = { name = "local" }\n', encoding="utf-8")
    (tmp_path / "top.toml").write_text(
        'base = "base.toml"\ngist = { mode = "shared" }\n', encoding="utf-8"
    )
    assert read_experiment(tmp_path / "top.toml") == {"gist": {"mode": "shared"}}
