"""Orders that no device follows, whoever sends them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import RejectedError
from fedkeep.core.types import TrainOrder
from tests.agent.builders import feed, make_agent, order


def planned(**changes: Any) -> Callable[[TrainOrder], TrainOrder]:
    def change(good: TrainOrder) -> TrainOrder:
        assert good.assignment is not None
        return replace(good, assignment=replace(good.assignment, **changes))

    return change


def trained(**changes: Any) -> Callable[[TrainOrder], TrainOrder]:
    return lambda good: replace(good, local=replace(good.local, **changes))


BAD: dict[str, tuple[str, Callable[[TrainOrder], TrainOrder]]] = {
    "a short model": ("model-shape", lambda o: replace(o, model=o.model[:-1])),
    "a model of doubles": ("model-shape", lambda o: replace(o, model=o.model.astype(np.float64))),
    "a model of NaN": (
        "model-not-finite",
        lambda o: replace(o, model=np.full_like(o.model, np.nan)),
    ),
    "a short direction": (
        "direction-shape",
        lambda o: replace(o, global_gradient=np.zeros(1, np.float32)),
    ),
    "an infinite direction": (
        "direction-not-finite",
        lambda o: replace(o, global_gradient=np.full_like(o.model, np.inf)),
    ),
    "a model of giants": (
        "model-too-large",
        lambda o: replace(o, model=np.full_like(o.model, 1e7)),
    ),
    "round 2**31": ("order-round", lambda o: replace(o, round=2**31)),
    "a negative round": ("order-round", lambda o: replace(o, round=-1)),
    "a round that is none": ("order-round", lambda o: replace(o, round=5.0)),  # type: ignore[arg-type]
    "an accepted round to come": ("order-round", lambda o: replace(o, accepted_round=2**40)),
    "a billion epochs": ("order-epochs", trained(epochs=10**9)),
    "no epoch": ("order-epochs", trained(epochs=0)),
    "a rate of NaN": ("order-learning-rate", trained(learning_rate=np.nan)),
    "an infinite rate": ("order-learning-rate", trained(learning_rate=np.inf)),
    "a negative rate": ("order-learning-rate", trained(learning_rate=-0.1)),
    "a rate of nothing": ("order-learning-rate", trained(learning_rate=0.0)),
    "an empty batch": ("order-batch-size", trained(batch_size=0)),
    "a proximal of NaN": ("order-proximal", trained(proximal=np.nan)),
    "quotas of another task": ("plan-shape", planned(quotas=np.array([1, 1]))),
    "quotas as numbers with a point": ("plan-shape", planned(quotas=np.array([4.0, 4.0, 4.0]))),
    "weights of another task": ("plan-shape", planned(label_weights=np.ones(2))),
    "a negative quota": ("plan-size", planned(quotas=np.array([-1, 4, 4]))),
    "more slots than there are": ("plan-size", planned(quotas=np.array([10**6, 4, 4]))),
    "a weight of NaN": ("plan-weights", planned(label_weights=np.array([1.0, np.nan, 1.0]))),
    "a negative weight": ("plan-weights", planned(label_weights=np.array([1.0, -1.0, 1.0]))),
    "an infinite mass": ("plan-weights", planned(mass_per_slot=np.inf)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_order_is_refused_and_changes_nothing(tmp_path: Path, name: str) -> None:
    reason, spoil = BAD[name]
    assembly = make_agent(tmp_path)
    feed(assembly.agent, 0, 30)
    assembly.agent.participate(order(assembly, 4))
    before = assembly.agent.device.snapshot()
    with pytest.raises(RejectedError, match=reason):
        assembly.agent.participate(spoil(order(assembly, 5)))
    after = assembly.agent.device.snapshot()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert assembly.agent.participate(order(assembly, 5)).round == 5
