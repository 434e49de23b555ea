"""The worked example of the paper's appendix A, and Eq. 10 and 11 on its numbers."""

import numpy as np
import pytest

from fedkeep.core.planning.greedy import Coordinator, Greedy, PaperGreedy
from fedkeep.core.planning.profiles import FleetProfiles

EXAMPLE = FleetProfiles.numbered([20, 40, 20], [[400, 200, 300], [200, 300, 200], [300, 0, 400]])


@pytest.mark.parametrize(
    "coordinator",
    [PaperGreedy(2, 2), PaperGreedy(2, 2, "fill"), Greedy(2, 2), Greedy(2, 2, improve_up_to=0)],
)
def test_the_appendix_example(coordinator: Coordinator) -> None:
    plan = coordinator.plan(EXAMPLE)
    assert plan.quotas.tolist() == [[10, 10, 0], [0, 20, 20], [10, 0, 10]]
    assert plan.label_weights == pytest.approx([36 / 23, 40 / 69, 24 / 23])
    assert plan.holders.tolist() == [2, 2, 2]
    assert plan.shortfalls == ()


@pytest.mark.parametrize("coordinator", [PaperGreedy(2, 2), Greedy(2, 2)])
def test_weighted_slots_have_the_labels_of_the_stream(coordinator: Coordinator) -> None:
    """gamma_y times the stored share is the share in the stream (Eq. 11)."""
    plan = coordinator.plan(EXAMPLE)
    stored = plan.label_weights * plan.quotas.sum(axis=0) / plan.quotas.sum()
    assert stored == pytest.approx(np.array([900, 500, 900]) / 2300)


@pytest.mark.parametrize("coordinator", [PaperGreedy(200, 10), Greedy(200, 10)])
def test_holding_all_labels_is_the_authors_setting(coordinator: Coordinator) -> None:
    """With limits beyond the fleet every device stores all labels it sees.

    The remainder goes to the frequent ones.
    """
    plan = coordinator.plan(EXAMPLE)
    assert plan.quotas.tolist() == [[7, 6, 7], [13, 14, 13], [10, 0, 10]]
