"""Plausible attacks through the real strategy: the run goes on nearly as without them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message

from fedkeep.core.types import Report, Vector
from fedkeep.deploy.credentials import provision
from fedkeep.flower import codec
from fedkeep.flower.client_app import make_client_app
from fedkeep.flower.codec import MASK
from fedkeep.flower.rounds import RoundOptions, RoundOutcome
from fedkeep.flower.strategy import FedkeepStrategy
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.release import ReleasePipeline
from fedkeep.privacy.secagg.client import SecureAggregationClient
from fedkeep.privacy.secagg.fixed_point import WORD, Words
from fedkeep.privacy.secagg.protocol import SecureAggregationConfig
from fedkeep.protocol.messages import DeviceRequest, Evaluated
from tests.flower.small_fleet import App, SmallFleet
from tests.flower.test_secure_flower import CLEAR, SECURE, Poisoned, changing

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
    """Inner-product manipulation: three times the fleet's last step, reversed."""
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


def declaring(app: App, velocity: np.ndarray) -> App:
    def run(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type != "query.profile":
            return reply
        said: dict[str, Any] = codec.decode(reply.content, Any)
        said["profile"]["velocity"] = velocity
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


LIES: dict[str, Callable[[], Lie]] = {
    "sign flipped, x1": lambda: moved(-1.0),
    "sign flipped, x3": lambda: moved(-3.0),
    "sign flipped, x10": lambda: moved(-10.0),
    "any direction, length 999": lambda: any_direction,
    "inner product, x3": against_the_last_step,
    "estimator turned, x10": lambda: turned_estimator,
}


def named(outcomes: list[RoundOutcome], *reasons: str) -> set[int]:
    """Who was refused, for one of these reasons or for any."""
    rejections = [rejection for outcome in outcomes for rejection in outcome.rejections]
    return {
        rejection.device for rejection in rejections if not reasons or rejection.reason in reasons
    }


def filtered(outcomes: list[RoundOutcome]) -> set[int]:
    return {device for outcome in outcomes for device in outcome.summary.filtered}


@pytest.mark.parametrize("inflated", [False, True])
@pytest.mark.parametrize("name", LIES)
def test_one_liar_of_ten_costs_the_run_little(name: str, inflated: bool, clean: float) -> None:
    made = fleet()
    made.apps[LIAR] = lying(made.apps[LIAR], LIES[name](), inflated=inflated, capacity=10**9)
    strategy, outcomes = played(made)
    assert made.accuracy(strategy) > 0.95 * clean
    found = named(outcomes) | filtered(outcomes)
    assert found <= {LIAR}, "nobody honest is refused"
    assert bool(found) == (inflated or name != "estimator turned, x10")
    assert all(
        outcome.metrics()["filtered"] == list(outcome.summary.filtered) for outcome in outcomes
    )


def test_a_gist_in_line_with_its_update_ends_no_run() -> None:
    def drawing() -> SmallFleet:
        return SmallFleet(
            devices=10,
            rounds=ROUNDS,
            options=ALL,
            policy="balanced-reservoir",
            table={"gist": {"mode": "shared"}},
        )

    honest, made = drawing(), drawing()
    made.apps[LIAR] = lying(made.apps[LIAR], gist_in_line, inflated=True)
    strategy, outcomes = played(made)
    assert made.accuracy(strategy) > 0.8 * honest.accuracy(played(honest)[0])
    assert named(outcomes) | filtered(outcomes) <= {LIAR}


def test_an_inflated_profile_counts_as_four_devices_at_most() -> None:
    made = fleet()
    made.apps[LIAR] = lying(made.apps[LIAR], lambda *_: None, inflated=True, capacity=10**9)
    strategy = made.strategy()
    outcome = next(strategy.rounds(made.grid(), 1))
    assert {"rate-cut", "capacity-cut"} <= {
        rejection.reason for rejection in outcome.rejections if rejection.device == LIAR
    }
    plan = strategy.server.plan
    assert plan is not None
    assert plan.quotas[LIAR].sum() <= 4 * np.median(plan.quotas.sum(axis=1))
    rates = [strategy.server.rate(device) for device in range(10)]
    assert rates[LIAR] <= 4.001 * np.median(rates)


@pytest.mark.parametrize(
    ("boast", "reason"),
    [
        (Evaluated(10**15, 0.0, 10**15), "bad-evaluation"),
        (Evaluated(10**9, 0.0, 10**9), "count-cut"),
        (Evaluated(50, 1e300, 50), "loss-cut"),
    ],
)
def test_a_boast_in_an_evaluation_is_named_and_moves_the_fleets_figures_little(
    boast: Evaluated, reason: str
) -> None:
    made = fleet()
    honest = made.apps[LIAR]

    def boasting(message: Message, context: Context) -> Message:
        evaluates = message.metadata.message_type == "evaluate"
        return (
            Message(codec.encode(boast), reply_to=message)
            if evaluates
            else honest(message, context)
        )

    options = RoundOptions(participation=1.0, deadline=5.0, evaluate_every=1)
    true = next(fleet().strategy(options=options).rounds(fleet().grid(), 1)).evaluation
    made.apps[LIAR] = boasting
    outcome = next(made.strategy(options=options).rounds(made.grid(), 1))
    assert outcome.evaluation["accuracy_robust"] == pytest.approx(true["accuracy"], abs=0.1)
    assert outcome.evaluation["accuracy"] < 0.75
    assert outcome.evaluation["loss"] < 100 * true["loss"]
    assert named([outcome], reason) == {LIAR}


def test_a_label_squatter_is_named_and_its_slots_go_to_others() -> None:
    def stores_nothing(told: dict[str, Any], model: np.ndarray) -> None:
        told |= {"model": model, "weight": 0.0, "steps": 0, "samples": 0}
        told |= {"local_gradient": None, "gradient_samples": 0}

    made = fleet()
    made.apps[LIAR] = declaring(
        lying(made.apps[LIAR], stores_nothing), np.array([0.0, 0.0, 0.0, 9.0])
    )
    strategy = made.strategy()
    rounds = strategy.rounds(made.grid(), ROUNDS)
    outcomes = [next(rounds)]
    assert strategy.server.plan is not None
    assert strategy.server.plan.quotas[LIAR].sum() > 0
    outcomes += rounds
    assert named(outcomes, "claim-unfounded") == {LIAR} == named(outcomes)
    assert strategy.server.plan.quotas[LIAR].sum() == 0
    assert (strategy.server.plan.holders > 0).all(), "its label is held by others"


@pytest.mark.parametrize("inflated", [False, True])
def test_a_liar_that_joins_late_costs_the_run_little(inflated: bool, clean: float) -> None:
    made = fleet()
    made.apps[LIAR] = lying(made.apps[LIAR], moved(-3.0), inflated=inflated)
    strategy, grid = made.strategy(), made.grid()
    late = grid.nodes.pop(1000 + LIAR)
    outcomes = []
    for outcome in strategy.rounds(grid, ROUNDS):
        outcomes.append(outcome)
        if len(outcomes) == ROUNDS // 2:
            grid.nodes[late.node_id] = late
    assert LIAR in outcomes[-1].summary.participants
    assert made.accuracy(strategy) > 0.95 * clean
    assert named(outcomes) | filtered(outcomes) == {LIAR}


@pytest.mark.parametrize("velocity", [1e31, 1e300])
def test_a_velocity_beyond_all_measure_is_refused_and_the_run_goes_on(velocity: float) -> None:
    made = fleet()
    made.apps[LIAR] = declaring(made.apps[LIAR], np.full(4, velocity))
    outcome = next(made.strategy().rounds(made.grid(), 1))
    assert 1000 + LIAR in {rejection.device for rejection in outcome.rejections}, (
        "its node: it has not become a device"
    )
    assert outcome.summary.accepted == tuple(d for d in range(10) if d != LIAR)


class Unbounded(SecureAggregationClient):
    """A member that from some round on masks a push by 900 for each device of the sum."""

    honest_sums = 0

    def _words(
        self, report: Report, model: Vector, terms: SecureAggregationConfig, *, lost: bool
    ) -> Words:
        words = super()._words(report, model, terms, lost=lost)
        self.honest_sums -= 1
        if self.honest_sums < 0:
            words[0] = WORD.type(int(900 * terms.summands / terms.update_grid.step) % 2**64)
        return words


def _always(device: Poisoned, _: Context) -> Poisoned:
    return device


def secure_fleet(
    devices: int, options: list[PrivacyOptions], liar: SecureAggregationClient | None = None
) -> SmallFleet:
    """A fleet whose devices have options of their own, and perhaps a liar among them."""
    made = SmallFleet(
        devices=devices, rounds=ROUNDS, options=replace(ALL, quorum=0.0), table=SECURE
    )
    plain = SmallFleet(devices=devices, rounds=ROUNDS, options=ALL, table=CLEAR)
    for number in range(devices):
        door = ReleasePipeline(options[number], made.strategy().server.gradient_size)
        if liar is not None and number == LIAR:
            door._member = liar
        made.apps[number] = make_client_app(
            partial(_always, Poisoned(plain.device(number), 0.0, door))
        )
    return made


def test_a_member_that_moves_the_mean_by_900_spoils_its_round_and_no_other() -> None:
    options = PrivacyOptions(secure_aggregation=True)
    strategy = fleet().strategy()
    liar = Unbounded(options, strategy.server.gradient_size)
    liar.honest_sums = 6
    made = secure_fleet(6, [options] * 6, liar)
    strategy = made.strategy()
    rounds = strategy.rounds(made.grid(), ROUNDS)
    assert all(next(rounds).quorate for _ in range(6))
    before = strategy.server.model.copy()
    assert not next(rounds).quorate
    np.testing.assert_array_equal(strategy.server.model, before)
    liar.honest_sums = 6
    assert next(rounds).quorate
    assert np.linalg.norm(strategy.server.model - before) < 10


def test_devices_that_a_server_invents_get_no_masked_word_of_a_member(tmp_path: Path) -> None:
    provisioned = provision(tmp_path, ["localhost"], ["a", "b", "c"])
    nodes, keys = str(tmp_path / "nodes"), [str(provisioned.node_key(name)) for name in "abc"]
    members = [
        PrivacyOptions(secure_aggregation=True, members=nodes, member_key=key) for key in keys
    ]
    asked: list[tuple[str, int]] = []

    def note(message: Message, reply: Message) -> Message:
        asked.append((message.metadata.message_type, message.metadata.dst_node_id - 1000))
        return reply

    def played_by(options: list[PrivacyOptions]) -> RoundOutcome:
        asked.clear()
        made = secure_fleet(len(options), options)
        for number, app in list(made.apps.items()):
            made.apps[number] = changing(app, MASK, note)
        return next(made.strategy().rounds(made.grid(), 1))

    assert played_by(members).summary.accepted == (0, 1, 2)
    assert (MASK, 0) in asked
    invented = PrivacyOptions(secure_aggregation=True)
    outcome = played_by([members[0], invented, invented])
    assert outcome.summary.missing == (0,)
    assert "not a member" in next(
        rejection.detail for rejection in outcome.rejections if rejection.device == 0
    )
    assert (MASK, 0) not in asked, "the victim's words never leave it"
