"""What server and devices must have alike: which options do, which do not, and the words."""

import pytest

from fedkeep.agent.assembly import parse_config
from fedkeep.config.agreement import DEFAULTS, agreement_of, check_agreement
from fedkeep.config.method import parse_fleet, parse_method
from fedkeep.core.errors import RejectedError
from fedkeep.tables import Table

FORM: Table = {"samples": {"shape": [3], "labels": 2}}
ODE: Table = {"policy": {"name": "ode"}, "preset": "paper"}


def terms(table: Table) -> dict[str, str]:
    return agreement_of(parse_method(table), regions=2)


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("policy", ["ode", "balanced-reservoir", "fifo", "reservoir"])
def test_a_fleet_and_an_agent_in_the_same_words_agree(preset: str, policy: str) -> None:
    table = {"preset": preset, "policy": {"name": policy}, **FORM}
    fleet, device = parse_fleet(table), parse_config(table).method
    check_agreement(agreement_of(fleet, 2), agreement_of(device, 2))


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"weights": {"client_label": 0.5}}, "weights.client_label"),
        ({"policy": {"name": "high-loss"}}, "exchange"),
        ({"gist": {"mode": "local"}, "weights": {"client_label": 1.0}}, "gist.mode"),
        (
            {"gist": {"mode": "shared", "last_layers": 1}, "policy": {"name": "high-loss"}},
            "gist.last_layers",
        ),
    ],
)
def test_what_must_agree_is_a_term_and_differs_in_words(tables: Table, key: str) -> None:
    found, plain = terms({**ODE, **tables}), terms(ODE)
    assert found.get(key) != plain.get(key)
    with pytest.raises(RejectedError, match=rf"{key} is '.*' on the device, '.*' in the fleet"):
        check_agreement(plain, found)
    with pytest.raises(RejectedError, match=key):
        check_agreement(found, plain)


@pytest.mark.parametrize(
    "tables",
    [
        {"storage": {"quotas": "soft", "rescore": False, "max_age": 5, "after_use": "discount"}},
        {"gist": {"drift_weight": 0.1, "max_ess": 5.0, "encoding": "int8"}},
        {"policy": {"name": "ode", "value": "cosine"}},
        {"privacy": {"epsilon": 1.0, "unit": "device"}},
    ],
)
def test_local_rules_encodings_and_privacy_are_no_terms(tables: Table) -> None:
    assert terms({**ODE, **tables}) == terms(ODE)


def test_only_what_is_not_at_its_default_is_sent() -> None:
    plain = parse_method({"policy": {"name": "high-loss"}, "preset": "paper"})
    assert plain.weights.client_label == 1.0, "without a plan every device weighs its own stream"
    assert agreement_of(plain, regions=1) == {"weights.client_label": "1"}


def test_an_option_that_a_release_does_not_know_differs_unless_it_is_at_its_default() -> None:
    check_agreement({}, {})
    check_agreement({"regions": "1"}, {})
    with pytest.raises(RejectedError, match="added is 'x' on the device, 'not known' in the fleet"):
        check_agreement({}, {"added": "x"})
    check_agreement({"regions": "7"}, None)


def test_a_hostile_agreement_is_cut_short() -> None:
    with pytest.raises(RejectedError, match="40 terms"):
        check_agreement({}, {str(number): "x" for number in range(40)})
    with pytest.raises(RejectedError) as refused:
        check_agreement({}, {"k" * 3000: "v" * 3000})
    assert len(refused.value.detail) < 400
    assert len(DEFAULTS) < 32
