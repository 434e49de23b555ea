"""Every registered policy satisfies every invariant, in every variant."""

import pytest

import fedkeep.config.components
from fedkeep.core.policies.fedbalancer import FedBalancer
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policies.reservoir import Reservoir
from fedkeep.core.policies.sld import Sld
from fedkeep.core.policy import POLICIES, SelectionPolicy
from fedkeep.testing import check_policy

assert fedkeep.config.components

VARIANTS: list[SelectionPolicy] = [
    *(cls() for cls in POLICIES.values()),
    FedBalancer(variant="authors"),
    Sld(variant="authors"),
    Reservoir(restart=True),
    Ode(value="cosine"),
    Ode(value="clipped"),
    Ode(value="divergence"),
    Ode(choice="drawn"),
    Ode(choice="drawn", sharpness=10),
]


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_keeps_the_laws(policy: SelectionPolicy) -> None:
    report = check_policy(policy)
    assert {"scores", "inputs", "rescoring"} <= set(report.passed)
    choosing = {"chunking", "restart", "repeatable", "memory"}
    assert choosing <= set(report.skipped if policy.unbounded else report.passed)
    assert ("global-gradient" in report.passed) == policy.uses_global_gradient
