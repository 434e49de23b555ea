"""Every registered policy satisfies every invariant, in every variant."""

import pytest

import fedkeep.config.components
from fedkeep.core.policies.fedbalancer import FedBalancer
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policies.reservoir import Reservoir
from fedkeep.core.policies.sld import Sld
from fedkeep.core.policy import POLICIES, ScoringContext, SelectionPolicy
from fedkeep.core.types import Batch, Scores
from fedkeep.testing import ConformanceError, check_policy

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
def test_satisfies_the_invariants(policy: SelectionPolicy) -> None:
    assert "chunking" in check_policy(policy)


class Nan(SelectionPolicy):
    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        return view.uniform * float("nan")


class LooksAtTheChunk(SelectionPolicy):
    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        losses = view.measurements.losses()
        return losses - losses.mean()


class Writes(SelectionPolicy):
    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        batch.x[:] = 0
        return view.uniform


class Forgets(SelectionPolicy):
    """Keeps state that no snapshot contains."""

    def __init__(self) -> None:
        self.calls = 0

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        self.calls += 1
        return view.uniform * self.calls


@pytest.mark.parametrize(
    "policy", [Nan(), LooksAtTheChunk(), Writes(), Forgets()], ids=lambda p: type(p).__name__
)
def test_a_broken_invariant_is_reported(policy: SelectionPolicy) -> None:
    with pytest.raises(ConformanceError):
        check_policy(policy)
