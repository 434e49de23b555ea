"""A policy that scores by arrival or at random asks for no measurement, and costs none."""

from collections.abc import Sequence
from typing import NoReturn

import pytest

from fedkeep.config.experiment import resolve
from fedkeep.core.types import Batch, Vector
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.sim.engine import Simulator


class Unmeasured(DenseLearner):
    """Softmax regression that trains, and refuses to measure."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__((shape[0], classes))

    def measure_many(self, models: Sequence[Vector], batches: Sequence[Batch]) -> NoReturn:
        raise AssertionError(f"{len(batches)} batches measured under {len(models)} models")


def played(policy: str) -> Simulator:
    table = {
        "task": {"name": "demo", "devices": 4},
        "model": {"name": f"{__name__}:Unmeasured"},
        "policy": {"name": policy},
        "train": {"rounds": 5, "participation": 0.5},
    }
    simulator = Simulator(resolve(table))
    for _ in range(5):
        simulator.play_round(evaluated=False)
    return simulator


@pytest.mark.parametrize("policy", ["fifo", "reservoir"])
def test_nothing_is_measured_where_scores_need_no_gradients(policy: str) -> None:
    assert played(policy).tally["samples_trained"] > 0


def test_scores_by_gradients_are_measured() -> None:
    with pytest.raises(AssertionError, match="batches measured"):
        played("ode")


def test_participants_of_a_round_share_one_copy_of_its_model() -> None:
    fleet = played("fifo").parts.fleet
    probes = [device.probe for device in fleet.devices.values()]  # type: ignore[union-attr]
    assert len({id(probe) for probe in probes}) < len(probes)
