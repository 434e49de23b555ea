"""Keys that nothing would read are a mistake, and the message says where they belong."""

import pytest

from fedkeep.agent.assembly import parse_config
from fedkeep.config.experiment import resolve
from fedkeep.config.method import fleet_tables, parse_fleet
from fedkeep.core.errors import ConfigError
from fedkeep.tables import Table

FORM: Table = {"samples": {"shape": [3], "labels": 2}}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"storage": {"capacity": 5}}, "'storage.capacity' is a device's"),
        ({"gist": {"encoding": "int8"}}, "'gist.encoding' is a device's"),
        ({"privacy": {"clip": 2.0}}, "'privacy.clip' is a device's"),
        ({"policy": {"name": "ode", "value": "cosine"}}, "'policy.value' is a device's"),
        ({"train": {"dropout": 0.1}}, "'train.dropout' is for simulations"),
        ({"estimator": {"exact_samples": 9}}, "'estimator.exact_samples' is for simulations"),
    ],
)
def test_a_fleet_rejects_what_its_server_does_not_read(tables: Table, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_fleet({**FORM, **tables})


def test_an_app_may_have_tables_for_its_own_devices() -> None:
    tables: Table = {
        **FORM,
        "storage": {"capacity": 5},
        "gist": {"mode": "local", "encoding": "int8"},
        "task": {"name": "demo"},
    }
    assert fleet_tables(tables) == {**FORM, "gist": {"mode": "local"}}
    assert parse_fleet(fleet_tables(tables)).gist.mode == "local"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"storage": {"capacity": 5}}, "an agent keeps what 'store.budget' holds"),
        ({"estimator": {"max_age": 3}}, "'estimator.max_age' is the server's"),
        ({"aggregation": {"name": "robust"}}, "unknown table 'aggregation'"),
        ({"train": {"epochs": 3}}, "unknown table 'train'"),
    ],
)
def test_an_agent_rejects_what_it_does_not_read(tables: Table, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({**FORM, **tables})


@pytest.mark.parametrize("key", ["sum_threshold", "min_cohort", "members", "public_key"])
def test_an_experiment_rejects_what_only_deployed_devices_read(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"'privacy\.{key}' is for deployed devices"):
        resolve({"task": {"name": "demo"}, "privacy": {key: 0.5}})
