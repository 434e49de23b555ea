"""What the `[privacy]` table refuses."""

import math
from typing import Any, Literal

import pytest

from fedkeep.core.aggregation import AGGREGATORS
from fedkeep.core.errors import ConfigError
from fedkeep.privacy.options import PrivacyOptions, refuse_conflicts


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epsilon", 0.0),
        ("epsilon", -1.0),
        ("epsilon", math.nan),
        ("delta", 0.0),
        ("delta", math.nan),
        ("clip", 0.0),
        ("clip", math.inf),
        ("model_clip", -2.0),
        ("profile_bound", math.nan),
        ("planned_participations", 0),
        ("retransmissions", -1),
        ("protect", ("model", "model")),
    ],
)
def test_values_that_bound_nothing_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} must"):
        PrivacyOptions(**{key: value})


def test_a_budget_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="protect must name"):
        PrivacyOptions(epsilon=1.0, protect=())


def test_noise_without_a_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="epsilon is not set"):
        PrivacyOptions().noise_multiplier()


@pytest.mark.parametrize("robust", ["trimmed", "norm-bounded"])
def test_robust_means_exclude_secure_sums(robust: Literal["trimmed", "norm-bounded"]) -> None:
    with pytest.raises(ConfigError, match=f'"{robust}" exclude'):
        refuse_conflicts(PrivacyOptions(secure_aggregation=True), AGGREGATORS[robust]())
    refuse_conflicts(PrivacyOptions(secure_aggregation=True), AGGREGATORS["fednova"]())
    refuse_conflicts(PrivacyOptions(), AGGREGATORS[robust]())
