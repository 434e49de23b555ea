"""Plausible lies through the real strategy and Flower's own messages: the run goes on nearly as without the liar."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message

from fedkeep.flower import codec
from fedkeep.flower.rounds import RoundOptions, RoundOutcome
from fedkeep.flower.strategy import FedkeepStrategy
from fedkeep.link.messages import DeviceRequest, Evaluated
from tests.flower.small_fleet import App, SmallFleet

LIAR, ROUNDS = 3, 12
ALL = RoundOptions(participation=1.0, deadline=5.0)
Lie = Callable[[dict[str, Any], np.ndarray], None]


def moved(factor: float) -> Lie:
    def lie(told: dict[str, Any], model: np.ndarray) -> None:
        told["model"] = (model + factor * (told["model"] - model)).astype(np.float32)

    return lie


def any_direction(told: dict[str, Any], model: np.ndarray) -> None:
    push = np.random.default_rng(0).standard_normal(len(model))
    told["model"] = (model + 999 * push / np.linalg.norm(push)).astype(np.float32)


def against_the_last_step() -> Lie:
    """Inner-product manipulation with what a device knows: three times the fleet's last step, turned round."""
    seen: list[np.ndarray] = []

    def lie(told: dict[str, Any], model: np.ndarray) -> None:
        seen.append(model.copy())
        told["model"] = (model - 3 * (model - seen[max(len(seen) - 2, 0)])).astype(np.float32)

    return lie


def gist_in_line(told: dict[str, Any], model: np.ndarray) -> None:
    """Any direction, as long as the honest update, and the longest gist that leads there."""
    push = np.random.default_rng(0).standard_normal(len(model))
    push *= np.linalg.norm(told["model"] - model) / np.linalg.norm(push)
    told["model"] = (model + push).astype(np.float32)
    if told["local_gradient"] is not None:
        told["local_gradient"] = (-1e3 * push[-len(told["local_gradient"]) :]).astype(np.float32)


def turned_estimator(told: dict[str, Any], model: np.ndarray) -> None:
    if told["local_gradient"] is not None:
        told["local_gradient"] = -10 * told["local_gradient"]


def lying(app: App, lie: Lie, *, inflated: bool = False, capacity: int = 0) -> App:
    def run(message: Message, context: Context) -> Message:
        reply = app(message, context)
        kind = message.metadata.message_type
        if kind not in ("train", "query.profile"):
            return reply
        said: dict[str, Any] = codec.decode(reply.content, Any)
        if kind == "train":
            told = said["report"]
            lie(told, codec.decode(message.content, DeviceRequest).order.model)
            told["weight"] = 1e15 if inflated else told["weight"]
        elif inflated:
            profile = said["profile"]
            profile["velocity"] = np.full_like(profile["velocity"], 1e15)
            profile["capacity"] = capacity or profile["capacity"]
        return Message(codec.encode(said), reply_to=message)

    return run


def fleet() -> SmallFleet:
    return SmallFleet(devices=10, rounds=ROUNDS, options=ALL)


def played(made: SmallFleet) -> tuple[FedkeepStrategy, list[RoundOutcome]]:
    strategy = made.strategy()
    return strategy, list(strategy.rounds(made.grid(), ROUNDS))


@pytest.fixture(scope="module")
def clean() -> float:
    made = fleet()
    return made.accuracy(played(made)[0])


LIES: dict[str, tuple[Lie, bool]] = {
    "sign flipped, x3": (moved(-3.0), False),
    "sign flipped, x10": (moved(-10.0), False),
    "any direction, length 999": (any_direction, False),
    "inner product, x3": (against_the_last_step(), False),
    "estimator turned, x10": (turned_estimator, False),
    "inflated profile, sign flipped": (moved(-1.0), True),
    "inflated profile, any direction": (any_direction, True),
}


@pytest.mark.parametrize("name", LIES)
def test_one_liar_of_ten_costs_the_run_little(name: str, clean: float) -> None:
    made, (lie, inflated) = fleet(), LIES[name]
    made.apps[LIAR] = lying(made.apps[LIAR], lie, inflated=inflated)
    strategy, outcomes = played(made)
    assert made.accuracy(strategy) > 0.95 * clean
    named = {refusal.device for outcome in outcomes for refusal in outcome.refusals}
    outvoted = {device for outcome in outcomes for device in outcome.summary.outvoted}
    assert named <= {LIAR}, "nobody honest is refused"
    assert (named | outvoted >= {LIAR}) == (name != "estimator turned, x10")
    assert outvoted <= {LIAR}
    assert all(outcome.metrics()["outvoted"] == list(outcome.summary.outvoted) for outcome in outcomes)


def test_a_gist_in_line_with_its_update_ends_no_run() -> None:
    def drawing() -> SmallFleet:
        return SmallFleet(devices=10, rounds=ROUNDS, options=ALL, policy="draw", table={"gist": {"name": "shared"}})

    honest, made = drawing(), drawing()
    made.apps[LIAR] = lying(made.apps[LIAR], gist_in_line, inflated=True)
    strategy, outcomes = played(made)
    assert made.accuracy(strategy) > 0.8 * honest.accuracy(played(honest)[0])
    assert {refusal.device for outcome in outcomes for refusal in outcome.refusals} <= {LIAR}
    assert {device for outcome in outcomes for device in outcome.summary.outvoted} <= {LIAR}


def test_an_inflated_profile_counts_as_four_devices_at_most() -> None:
    made = fleet()
    made.apps[LIAR] = lying(made.apps[LIAR], lambda *_: None, inflated=True, capacity=10**9)
    strategy = made.strategy()
    outcome = next(strategy.rounds(made.grid(), 1))
    assert {"rate-cut", "capacity-cut"} <= {refusal.reason for refusal in outcome.refusals if refusal.device == LIAR}
    plan = strategy.server.plan
    assert plan is not None
    assert plan.quotas[LIAR].sum() <= 4 * np.median(plan.quotas.sum(axis=1))
    rates = [strategy.server.rate(device) for device in range(10)]
    assert rates[LIAR] <= 4.001 * np.median(rates)


def test_a_claimed_count_of_right_answers_moves_the_fleets_accuracy_little() -> None:
    made = fleet()
    honest = made.apps[LIAR]

    def boasting(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type != "evaluate":
            return reply
        return Message(codec.encode(Evaluated(10**9, 0.0, 10**9)), reply_to=message)

    options = RoundOptions(participation=1.0, deadline=5.0, evaluate_every=1)
    true = next(fleet().strategy(options=options).rounds(fleet().grid(), 1)).evaluation
    made.apps[LIAR] = boasting
    outcome = next(made.strategy(options=options).rounds(made.grid(), 1))
    assert outcome.evaluation["accuracy_robust"] == pytest.approx(true["accuracy"], abs=0.1)
    assert outcome.evaluation["accuracy"] < 0.75
    assert (LIAR, "count-cut") in {(refusal.device, refusal.reason) for refusal in outcome.refusals}
