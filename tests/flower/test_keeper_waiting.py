"""A Keeper with samples whose labels come later: the same device as everywhere, by a user's ids."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict

from fedkeep.config.device import build_device
from fedkeep.config.method import parse_method
from fedkeep.core.errors import ConfigError
from fedkeep.core.regions import LabelRegions
from fedkeep.core.types import LocalTraining, TrainOrder
from fedkeep.flower.keeper import Keeper, _numbered
from fedkeep.flower.keeper_records import KeeperOrder
from fedkeep.learn.dense_learner import DenseLearner

SHAPE, LABELS = 4, 3
X = np.random.default_rng(0).standard_normal((60, SHAPE)).astype(np.float32)
Y = np.arange(60) % LABELS
NAMES = [f"cycle {i}" for i in range(60)]


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(SHAPE, LABELS)


def opened(context: Context, **options: Any) -> Keeper:
    return Keeper.open(context, module, 8, **{"waiting": {"share": 0.5}, **options})


@pytest.fixture
def context() -> Context:
    state = RecordDict()
    return Context(run_id=1, node_id=7, node_config={}, state=state, run_config={})


def sync(keeper: Keeper) -> None:
    keeper.sync(ArrayRecord(module().state_dict()))


def test_samples_wait_over_messages_and_count_with_their_labels(context: Context) -> None:
    with opened(context) as keeper:
        keeper.offer(X[:3], ids=NAMES[:3])
        sync(keeper)
        assert keeper.samples() == []
    with opened(context) as keeper:
        assert keeper.status().waiting["samples"] == 3
        keeper.label(NAMES[1:3], Y[1:3])
        assert keeper.status().labels == {1: 1, 2: 1}
        for (x, y), place in zip(keeper.samples(), (1, 2), strict=True):
            np.testing.assert_array_equal(x, X[place])
            assert y == Y[place]
        sync(keeper)
        assert keeper.records()["fedkeep.keeper"]["samples"] == 2


def test_a_correction_changes_what_is_trained_on(context: Context) -> None:
    with opened(context) as keeper:
        keeper.offer(X[:2], Y[:2], ids=NAMES[:2])
        keeper.label([NAMES[0], NAMES[0]], [2, 2])
        assert [y for _, y in keeper.samples()] == [2, 1]
        assert (keeper.status().fates["label.corrected"], keeper.status().fates["label.known"]) == (
            1,
            1,
        )


def test_a_label_may_come_before_its_sample(context: Context) -> None:
    with opened(context) as keeper:
        keeper.offer(X[:1], Y[:1], ids=NAMES[:1])
        keeper.label(NAMES[1:2], [2])
    with opened(context) as keeper:
        keeper.offer(X[1:2], ids=NAMES[1:2])
        assert [y for _, y in keeper.samples()] == [0, 2]


def test_targets_of_a_loss_of_ones_own_come_later_too(context: Context) -> None:
    options = {"loss": torch.nn.MSELoss(reduction="none")}
    targets = np.random.default_rng(1).standard_normal((4, LABELS)).astype(np.float32)
    with opened(context, **options) as keeper:
        with pytest.raises(ConfigError, match="offer one with its target first"):
            keeper.offer(X[:1], ids=NAMES[:1])
        keeper.offer(X[:1], targets[:1], ids=NAMES[:1])
        keeper.offer(X[1:3], ids=NAMES[1:3])
        keeper.label(NAMES[1:2], targets[1:2])
        keeper.label(NAMES[3:4], targets[3:4])
        assert keeper.status().fates["label.unknown"] == 1
        sync(keeper)
        held = {tuple(x): y for x, y in keeper.samples()}
        np.testing.assert_array_equal(held[tuple(X[1])], targets[1])
        assert len(held) == 2


def test_numbers_divided_into_intervals_come_later_too(context: Context) -> None:
    def one() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(SHAPE, 1)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out[:, 0] - y) ** 2

    options: dict[str, Any] = {"loss": loss, "edges": (10.0, 20.0)}
    waiting = {"share": 0.5, "rule": "uncertain"}
    with Keeper.open(context, one, 8, waiting=waiting, **options) as keeper:
        keeper.offer(X[:1], np.array([5.0], dtype=np.float32), ids=NAMES[:1])
        keeper.offer(X[1:3], ids=NAMES[1:3])
        keeper.sync(ArrayRecord(one().state_dict()))
        keeper.offer(X[3:4], ids=NAMES[3:4])
        keeper.label([NAMES[1], NAMES[3], NAMES[1]], np.array([15.5, 25.5, 16.5]))
        assert sorted(float(y) for _, y in keeper.samples()) == [5.0, 16.5, 25.5]
        assert keeper.status().labels == {0: 1, 1: 1, 2: 1}
        assert keeper.status().fates["label.corrected"] == 1


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({}, lambda k: k.offer(X[:2]), "samples without labels wait under their ids"),
        (
            {"waiting": None},
            lambda k: k.offer(X[:2], ids=NAMES[:2]),
            r"give Keeper.open waiting=\{'share'",
        ),
        ({}, lambda k: k.offer(X[:2], ids=NAMES[:1]), "one id a sample: got 1 for 2"),
        ({}, lambda k: k.label(NAMES[:1], [1]), "none was yet"),
    ],
)
def test_mistakes_are_one_sentence(context: Context, options: Any, call: Any, message: str) -> None:
    keeper = opened(context, **options)
    with pytest.raises(ConfigError, match=message):
        call(keeper)


@pytest.mark.parametrize("rule", ["oldest", "random", "balanced"])
@pytest.mark.parametrize("policy", ["fifo", "high-loss", "balanced-reservoir"])
def test_a_keeper_and_a_device_do_the_same(context: Context, policy: str, rule: str) -> None:
    """With one seed, one division of the slots, and the numbers that a Keeper gives to names."""
    waiting = {"share": 0.5, "rule": rule, "early_labels": 3}
    tables = {"policy": {"name": policy}, "gist": {"mode": "local"}, "waiting": waiting}
    learner = DenseLearner((SHAPE, LABELS))
    device = build_device(
        parse_method(tables),
        learner,
        capacity=8,
        sample_shape=(SHAPE,),
        labels=LABELS,
        regions=LabelRegions(LABELS),
        seed=context.node_id,
    )
    ids = np.array([_numbered(name) for name in NAMES])
    delay = 5
    weights = [p.detach().numpy() for p in module().parameters()]
    vector = np.concatenate([w.ravel() for w in weights]).astype(np.float32)
    for step in range(20):
        part = slice(2 * step, 2 * step + 2)
        known = slice(max(0, 2 * step - delay), max(0, 2 * step + 2 - delay))
        with opened(context, policy=policy, gist="local", waiting=waiting) as keeper:
            keeper.offer(X[part], ids=NAMES[part])
            if len(NAMES[known]):
                keeper.label(NAMES[known], Y[known])
            if step % 5 == 4:
                sync(keeper)
            held, status = keeper.samples(), keeper.status()
        device.wait(X[part], ids[part], 0.0)
        device.label(ids[known], Y[known], 0.0)
        if step % 5 == 4:
            order = TrainOrder(KeeperOrder().round, vector, None, LocalTraining(1.0, 1))
            device.participate(order)
        stored = device.store.stored().batch
        np.testing.assert_array_equal(np.array([x for x, _ in held]).reshape(-1), stored.x.ravel())
        assert [y for _, y in held] == stored.y.tolist()
        assert device.waiting is not None
        expected = {"samples": len(device.waiting), "slots": 4, **device.waiting.counts}
        assert status.waiting == expected


def test_a_labelled_sample_enters_one_estimate_and_a_correction_none(
    context: Context, tmp_path: Any
) -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"epsilon": 50.0, "unit": "sample", "protect": ["estimator"]}
    options = {"privacy": privacy, "policy": "ode", "directory": str(tmp_path)}
    seen: list[int] = []
    keeper = opened(context, **options)
    keeper.offer(X[:1], Y[:1], ids=NAMES[:1])
    sync(keeper)
    assert keeper._stream is not None
    see = keeper._stream.device.entering

    def noted(ids: Any) -> None:
        seen.extend(ids.tolist())
        see(ids)

    keeper._stream.device.entering = noted
    keeper.offer(X[1:4], ids=NAMES[1:4])
    assert seen == []
    keeper.label(NAMES[1:4], Y[1:4])
    keeper.label(NAMES[1:4], (Y[1:4] + 1) % LABELS)
    assert len(seen) == len(set(seen)) == 3


def test_batches_of_labelled_samples_with_ids_are_as_without(context: Context) -> None:
    with opened(context, waiting=None) as keeper:
        keeper.offer(X[:5], Y[:5], ids=NAMES[:5])
        keeper.offer(X[:5], Y[:5], ids=NAMES[:5])
        assert keeper.status().fates == {"kept": 5, "refreshed": 5}
