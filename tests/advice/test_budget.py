"""Bytes are counted as a device keeps them, and spent where they say most."""

from dataclasses import replace

import numpy as np
import pytest

from fedkeep.advice.budget import (
    enough_slots,
    expected_noise,
    kept_bytes,
    spend_bytes,
    spend_in_simulation,
    spend_on_device,
)
from fedkeep.agent.assembly import parse_config, slots_within
from fedkeep.config.device import build_device
from fedkeep.config.experiment import resolve
from fedkeep.config.method import parse_method
from fedkeep.core.errors import ConfigError
from fedkeep.core.gist import GistOptions
from fedkeep.core.types import Batch, LocalTraining, TrainOrder
from fedkeep.encoding import EncodingName
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.sim.assembly import load_data

LEARNER, SHAPE, LABELS = DenseLearner((60, 40, 5)), (60,), 5


@pytest.mark.parametrize(
    "gist",
    [
        {"mode": "none"},
        {"mode": "local"},
        {"mode": "local", "encoding": "int8"},
        {"mode": "shared", "rank": 4, "encoding": "int4"},
    ],
)
def test_what_is_counted_is_what_a_device_snapshots(gist: dict[str, object]) -> None:
    method = parse_method({"gist": gist})
    device = build_device(method, LEARNER, capacity=6, sample_shape=SHAPE, labels=LABELS)
    device.set_model(LEARNER.initial(0))
    rng = np.random.default_rng(0)
    for round_ in range(2):
        x = rng.standard_normal((20, *SHAPE), dtype=np.float32)
        batch = Batch(x, rng.integers(0, LABELS, 20), 100 * round_ + np.arange(20))
        device.observe(batch, float(round_))
        order = TrainOrder(round_, LEARNER.initial(1), None, LocalTraining(0.01, epochs=2))
        device.participate(order)
    state = device.snapshot()
    counted = kept_bytes(method, LEARNER, slots=6, sample_shape=SHAPE, labels=LABELS)
    assert counted.samples == state["store.x"].nbytes
    kept = sum(array.nbytes for name, array in state.items() if name.startswith("window."))
    assert counted.window == kept - state["window.counts"].nbytes
    assert (counted.window > 0) == (gist["mode"] != "none")
    kept = sum(array.nbytes for name, array in state.items() if name.startswith("gist."))
    assert counted.gist == kept


def slots_of(samples: int, gist_costs: int):  # type: ignore[no-untyped-def]
    def found(encoding: EncodingName | None, gist: GistOptions) -> int:
        return (samples - gist_costs * gist.kept) * (2 if encoding == "int8" else 1)

    return found


def test_few_slots_and_a_cheap_gist_are_spent_on_the_gist() -> None:
    plan = spend_bytes(1000, slots_of(6, 1), labels=4)
    assert plan.best.gist.kept
    assert (plan.best.slots, plan.best.encoding) == (10, "int8")
    assert "less noise" in plan.reason
    assert plan.best.noise < plan.samples_alone.noise


def test_where_samples_are_enough_or_the_gist_is_dear_all_is_spent_on_samples() -> None:
    enough = spend_bytes(1000, slots_of(25, 0), labels=4)
    assert not enough.best.gist.kept
    assert spend_bytes(1000, slots_of(24, 0), labels=4).best.gist.kept
    assert "50 samples or more a gist gains nothing" in enough.reason
    dear = spend_bytes(1000, slots_of(6, 4), labels=4)
    assert not dear.best.gist.kept
    assert "more samples than it is worth" in dear.reason
    assert enough_slots(30) == 60
    with pytest.raises(ConfigError, match="hold no sample"):
        spend_bytes(1000, slots_of(0, 0), labels=4)


def test_the_rule_prefers_fewer_bytes_only_where_they_cost_little() -> None:
    whole = GistOptions("local", encoding="float32")
    coarse = GistOptions("local", rank=4, encoding="int4")
    assert (
        expected_noise(10, whole) < expected_noise(10, coarse) < expected_noise(10, GistOptions())
    )
    # Of two that are level the simpler comes first: every number in float32.
    assert spend_bytes(1, slots_of(6, 0), labels=4).best.gist == whole


def test_what_is_chosen_fits() -> None:
    method = parse_method({})
    form = {"sample_shape": SHAPE, "labels": LABELS}
    for budget in (1500, 4000, 12_000):
        plan = spend_in_simulation(budget, method, LEARNER, **form)  # type: ignore[arg-type]
        for one in plan.plans[:6]:
            own = replace(method, gist=one.gist)
            sizes = [
                kept_bytes(own, LEARNER, slots=n, encoding=one.encoding, **form).total  # type: ignore[arg-type]
                for n in (one.slots, one.slots + 1)
            ]
            assert sizes[0] <= budget < sizes[1]


def test_an_agents_file_holds_what_is_advised() -> None:
    data = load_data(resolve({"task": {"name": "demo"}, "policy": {"name": "fifo"}}).task, 0)
    plan = spend_on_device(120_000, data)
    assert not plan.best.gist.kept
    assert plan.best.encoding in ("float16", "int8")
    agent = {
        "samples": {"shape": list(data.sample_shape), "labels": data.labels},
        "model": {"name": "softmax"},
        "policy": {"name": "balanced-reservoir"},
        "gist": {"mode": "none"},
        "store": {"path": "s", "budget": 120_000, "encoding": plan.best.encoding},
    }
    assert slots_within(parse_config(agent)) == plan.best.slots
    with pytest.raises(ConfigError, match="hold no sample"):
        spend_on_device(5_000, data)
