"""Secure sums over Flower's messages: the plain run's model, with dropouts, nothing in clear."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedkeep_app.catch_up import CatchUpDevice
from flwr.app import Context, Message, RecordDict

from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.types import TrainOrder
from fedkeep.flower import codec
from fedkeep.flower.client_app import make_client_app
from fedkeep.flower.codec import MASK, SHARE, TRAIN, UNMASK
from fedkeep.flower.rounds import RoundOptions
from fedkeep.flower.server_app import open_strategy
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.strategy import FedkeepStrategy
from fedkeep.privacy.release import ReleasePipeline
from fedkeep.privacy.secagg import protocol as told
from fedkeep.protocol.messages import (
    Answered,
    DeviceReply,
    DeviceRequest,
    Participate,
    Reported,
    reply_of,
)
from tests.flower.in_process import InProcessGrid
from tests.flower.small_fleet import App, SmallFleet

SECURE = {"privacy": {"secure_aggregation": True}}
CLEAR = {"aggregation": {"name": "fedavg"}}
"""What a secure sum can be compared with: the default mean must see single reports."""
ALL = RoundOptions(participation=1.0, deadline=0.3, quorum=0.0)


def fleet(devices: int = 5, options: RoundOptions = ALL, **tables: Any) -> SmallFleet:
    return SmallFleet(devices=devices, options=options, table={**SECURE, **tables})


def played(of: SmallFleet, rounds: int) -> FedkeepStrategy:
    strategy = of.strategy()
    list(strategy.rounds(of.grid(), rounds))
    return strategy


@pytest.mark.parametrize("aggregation", ["fedavg", "fednova"])
@pytest.mark.parametrize("estimator", ["incremental", "round-mean"])
def test_the_same_model_and_direction_as_in_the_clear(estimator: str, aggregation: str) -> None:
    tables = {"estimator": {"name": estimator}, "aggregation": {"name": aggregation}}
    servers = [
        played(SmallFleet(table={**tables, **privacy}), 6).server for privacy in (CLEAR, SECURE)
    ]
    models = [server.model for server in servers]
    directions = [server.estimator.global_gradient() for server in servers]
    assert np.abs(models[0] - models[1]).max() < 1e-6
    assert np.abs(models[0]).max() > 1e-3
    assert np.abs(directions[0] - directions[1]).max() < 1e-6  # type: ignore[operator]


def test_a_policy_without_estimators_too() -> None:
    servers = [
        played(SmallFleet(policy="reservoir", table=privacy), 3).server
        for privacy in (CLEAR, SECURE)
    ]
    assert np.abs(servers[0].model - servers[1].model).max() < 1e-6
    assert servers[1].estimator.global_gradient() is None


def test_noise_and_masks_go_together(tmp_path: Path) -> None:
    """What is masked is what the guard lets out: the sum of noisy reports, with the same ledger."""
    pytest.importorskip("dp_accounting", reason="needs the privacy extra")
    noise: dict[str, Any] = {
        "epsilon": 2.0,
        "clip": 0.5,
        "protect": ["estimator", "model"],
        "planned_participations": 4,
    }
    fleets = [
        SmallFleet(
            directory=tmp_path / f"{secure}",
            table={**CLEAR, "privacy": {**noise, "secure_aggregation": secure}},
        )
        for secure in (False, True)
    ]
    servers = [played(of, 4).server for of in fleets]
    ledgers = [of.memories[0].load()["gate.ledger.releases"].tolist() for of in fleets]
    assert np.abs(servers[0].model - servers[1].model).max() < 1e-6
    directions = [server.estimator.global_gradient() for server in servers]
    assert np.abs(directions[0] - directions[1]).max() < 1e-6  # type: ignore[operator]
    assert ledgers[0] == ledgers[1]
    assert sum(ledgers[1]) > 0


class DroppingGrid(InProcessGrid):
    """Loses the replies of some nodes to messages of some kind."""

    def __init__(self, grid: InProcessGrid, kind: str, devices: set[int]) -> None:
        super().__init__(grid.nodes.values())
        self._kind, self._nodes = kind, {1000 + device for device in devices}
        self._lost: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        outgoing = list(messages)
        ids = super().push_messages(outgoing)
        for message, key in zip(outgoing, ids, strict=True):
            if (
                message.metadata.message_type == self._kind
                and message.metadata.dst_node_id in self._nodes
            ):
                self._lost.add(key)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return super().pull_messages(key for key in message_ids if key not in self._lost)


@pytest.mark.parametrize("kind", [TRAIN, SHARE, MASK, UNMASK])
def test_a_round_goes_on_without_those_who_drop_out_at_any_step(kind: str) -> None:
    secure, plain = fleet(), SmallFleet(devices=5, options=ALL, table=CLEAR)
    strategy, clear = secure.strategy(), plain.strategy()
    first = next(strategy.rounds(DroppingGrid(secure.grid(), kind, {1, 3}), 2))
    gone = {1, 3} if kind != UNMASK else set()
    assert first.quorate
    assert first.summary.accepted == tuple(d for d in range(5) if d not in gone)
    next(clear.rounds(DroppingGrid(plain.grid(), TRAIN, gone), 2))
    assert np.abs(strategy.server.model - clear.server.model).max() < 1e-6
    second = next(strategy.rounds(secure.grid(), 2))
    next(clear.rounds(plain.grid(), 2))
    assert second.summary.accepted == (0, 1, 2, 3, 4)
    direction, expected = (
        strategy.server.estimator.global_gradient(),
        clear.server.estimator.global_gradient(),
    )
    assert np.abs(direction - expected).max() < 1e-6  # type: ignore[operator]


@pytest.mark.parametrize("kind", [TRAIN, SHARE, MASK, UNMASK])
def test_with_too_few_left_a_round_changes_nothing_and_the_next_one_loses_nothing(
    kind: str,
) -> None:
    secure = fleet()
    strategy = secure.strategy()
    before = strategy.server.model.tobytes()
    outcome = next(strategy.rounds(DroppingGrid(secure.grid(), kind, {0, 1, 3}), 2))
    assert not outcome.quorate
    assert strategy.server.model.tobytes() == before
    assert strategy.server.estimator.global_gradient() is None
    assert next(strategy.rounds(secure.grid(), 2)).quorate
    assert strategy.server.estimator.global_gradient() is not None


def test_a_stricter_threshold_tolerates_fewer() -> None:
    secure = fleet(privacy={"secure_aggregation": True, "sum_threshold": 0.8})
    outcome = next(secure.strategy().rounds(DroppingGrid(secure.grid(), MASK, {1}), 1))
    assert not outcome.quorate


def test_one_device_alone_is_never_summed() -> None:
    secure = fleet(devices=1)
    outcome = next(secure.strategy().rounds(secure.grid(), 1))
    assert not outcome.quorate


def changing(app: App, kind: str, change: Callable[[Message, Message], Message]) -> App:
    """The app, with its replies to one kind of message replaced."""

    def run(message: Message, context: Context) -> Message:
        reply = app(message, context)
        return change(message, reply) if message.metadata.message_type == kind else reply

    return run


def test_an_answer_in_the_clear_is_refused_and_named() -> None:
    secure = fleet()
    plain = SmallFleet(devices=5, options=ALL, table=CLEAR)

    def in_the_clear(message: Message, context: Context) -> Message:
        if message.metadata.message_type == TRAIN:
            message.content = codec.encode(
                Participate.of(codec.decode(message.content, DeviceRequest).order)
            )
        return plain.apps[2](message, context)

    secure.apps[2] = in_the_clear
    outcome = next(secure.strategy().rounds(secure.grid(), 1))
    assert [(r.device, r.reason) for r in outcome.rejections] == [(2, "answer in the clear")]
    assert outcome.summary.accepted == (0, 1, 3, 4)


@pytest.mark.parametrize("kind", [TRAIN, SHARE, MASK, UNMASK])
def test_an_answer_of_an_earlier_sum_is_refused(kind: str) -> None:
    secure = fleet(devices=4)
    heard: list[RecordDict] = []

    def replayed(message: Message, reply: Message) -> Message:
        heard.append(reply.content)
        return Message(heard[0], reply_to=message)

    secure.apps[1] = changing(secure.apps[1], kind, replayed)
    rounds = secure.strategy().rounds(secure.grid(), 2)
    assert next(rounds).rejections == ()
    second = next(rounds)
    assert [(r.device, r.reason) for r in second.rejections] == [(1, "replayed")]
    assert second.quorate


def test_a_question_of_an_earlier_sum_gets_no_answer() -> None:
    """A server that asks again, with other survivors, learns nothing more."""
    secure = fleet(devices=3)
    asked: list[Message] = []
    app = secure.apps[0]

    def overheard(message: Message, context: Context) -> Message:
        asked.append(message)
        return app(message, context)

    secure.apps[0] = overheard
    next(secure.strategy().rounds(secure.grid(), 1))
    context = secure.grid().nodes[1000].context
    for message in asked:
        if message.metadata.message_type in (SHARE, MASK, UNMASK):
            with pytest.raises(RejectedError, match="another sum"):
                app(message, context)


class Poisoned:
    """A device whose training goes wrong."""

    def __init__(self, inner: CatchUpDevice, poison: float, door: ReleasePipeline) -> None:
        self._inner, self._poison, self._door = inner, np.float32(poison), door
        self.profile, self.encrypted_profile = inner.profile, inner.encrypted_profile
        self.participate, self.answer = inner.participate, door.answer

    def reply(self, request: DeviceRequest) -> DeviceReply:
        return reply_of(self, self._inner.evaluate, request)

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        report = self._inner.participate(order)
        report = replace(report, model=report.model + self._poison)
        return self._door.hold(report, order, self._door.terms(terms))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("poison", "reason"),
    [(np.nan, "model-not-finite"), (np.inf, "model-not-finite"), (1e30, "large-update")],
)
def test_a_device_declines_to_mask_what_a_sum_would_hide(
    poison: float, reason: str, deterministic: bool
) -> None:
    options = replace(ALL, deterministic=deterministic)
    secure, plain = fleet(options=options), SmallFleet(devices=5, options=options, table=CLEAR)
    strategy = secure.strategy()
    door = ReleasePipeline(secure.experiment.privacy, strategy.server.gradient_size, lambda: None)
    device = Poisoned(plain.device(2), poison, door)
    secure.apps[2] = make_client_app(lambda _: device)
    outcome = next(strategy.rounds(secure.grid(), 1))
    assert outcome.quorate != deterministic
    assert outcome.summary.accepted == (() if deterministic else (0, 1, 3, 4))
    assert [(r.device, r.reason) for r in outcome.rejections] == [(2, reason)]
    assert np.isfinite(strategy.server.model).all()


def test_devices_with_nothing_take_part_with_zeros() -> None:
    secure = fleet(stream={"rounds_per_pass": 1000})
    strategy = secure.strategy()
    before = strategy.server.model.tobytes()
    outcome = next(strategy.rounds(secure.grid(), 1))
    assert outcome.quorate
    assert outcome.summary.accepted == (0, 1, 2, 3, 4)
    assert strategy.server.model.tobytes() == before


def test_the_server_receives_nothing_that_resembles_an_update() -> None:
    secure, plain = fleet(devices=4), SmallFleet(devices=4, options=ALL, table=CLEAR)
    received: dict[int, np.ndarray] = {}
    sent: dict[int, np.ndarray] = {}
    for device in range(4):

        def keep(message: Message, reply: Message, device: int = device) -> Message:
            words = told.decode(codec.decode_answer(reply.content, 1 << 20), told.MaskedWords).words
            received[device] = np.frombuffer(words, dtype="<i8").astype(np.float64)
            return reply

        def keep_clear(message: Message, reply: Message, device: int = device) -> Message:
            sent[device] = codec.decode(reply.content, Reported).report.model
            return reply

        secure.apps[device] = changing(secure.apps[device], MASK, keep)
        plain.apps[device] = changing(plain.apps[device], TRAIN, keep_clear)
    strategy = secure.strategy()
    start = strategy.server.model.copy()
    next(strategy.rounds(secure.grid(), 1))
    next(plain.strategy().rounds(plain.grid(), 1))
    for device in range(4):
        update = sent[device] - start
        seen = received[device][: len(update)]
        assert np.abs(update).max() > 1e-3
        assert abs(np.corrcoef(update, seen)[0, 1]) < 4 / np.sqrt(len(update))
        assert np.abs(seen).mean() > 2.0**60


def test_the_plain_and_the_secure_do_not_answer_each_other() -> None:
    secure, plain = fleet(devices=3), SmallFleet(devices=3, options=ALL, table=CLEAR)
    for strategy, grid, said in (
        (plain.strategy(), secure.grid(), "answers secure orders only"),
        (secure.strategy(), plain.grid(), "masks nothing"),
    ):
        before = strategy.server.model.tobytes()
        outcome = next(strategy.rounds(grid, 1))
        assert outcome.summary.accepted == ()
        assert strategy.server.model.tobytes() == before
        assert len(outcome.rejections) == 3
        assert all(said in refusal.detail for refusal in outcome.rejections)


def test_killed_and_resumed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    """Servers stop between rounds, one before its commit; devices restart for every message."""
    whole = SmallFleet(rounds=6, table=SECURE)
    reference = played(whole, 6)
    resumed = SmallFleet(rounds=6, directory=tmp_path / "devices", table=SECURE)
    for stop in (1, 3, 6):
        strategy = resumed.strategy(StateStore(str(tmp_path / "s.db"), "run"))
        assert strategy.resume() == (stop > 1)
        list(strategy.rounds(resumed.grid(), stop))
        if stop == 3:
            strategy.store = None
            next(strategy.rounds(resumed.grid(), 4))
    assert strategy.server.model.tobytes() == reference.server.model.tobytes()
    direction, expected = (
        strategy.server.estimator.global_gradient(),
        reference.server.estimator.global_gradient(),
    )
    assert direction.tobytes() == expected.tobytes()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [TRAIN, SHARE, MASK, UNMASK])
def test_in_deterministic_mode_a_round_in_which_a_node_failed_is_played_again(kind: str) -> None:
    reference, shaken = SmallFleet(table=SECURE), SmallFleet(table=SECURE)
    failures: list[str] = []

    def fail_once(message: Message, reply: Message) -> Message:
        if not failures:
            failures.append(kind)
            raise OSError("out of memory")
        return reply

    for device, app in list(shaken.apps.items()):
        shaken.apps[device] = changing(app, kind, fail_once)
    strategy = played(shaken, 3)
    assert failures
    assert strategy.server.model.tobytes() == played(reference, 3).server.model.tobytes()


def test_a_device_that_lost_its_memory_makes_the_sum_begin_anew(tmp_path: Path) -> None:
    secure = SmallFleet(devices=4, options=ALL, directory=tmp_path, table=SECURE)
    rounds = (strategy := secure.strategy()).rounds(secure.grid(), 4)
    next(rounds)
    memory = secure.memories[2]
    memory.save(
        {name: array for name, array in memory.load().items() if not name.startswith("sums.")}
    )
    assert 2 in next(rounds).summary.accepted
    next(rounds)
    plain = SmallFleet(devices=4, options=ALL, table=CLEAR)
    clear = played(plain, 3)
    direction, expected = (
        strategy.server.estimator.global_gradient(),
        clear.server.estimator.global_gradient(),
    )
    assert np.abs(direction - expected).max() < 1e-6  # type: ignore[operator]


def test_those_who_left_for_good_are_forgotten_and_those_who_return_count_once() -> None:
    secure, plain = fleet(), SmallFleet(devices=5, options=ALL, table=CLEAR)
    directions = []
    for of in (secure, plain):
        strategy, grid = of.strategy(), of.grid()
        rounds = strategy.rounds(grid, 5)
        next(rounds)
        left = grid.nodes.pop(1004)
        next(rounds)
        next(rounds)
        directions.append(strategy.server.estimator.global_gradient())
        grid.nodes[1004] = left
        next(rounds)
        directions.append(strategy.server.estimator.global_gradient())
    for direction, expected in zip(directions[:2], directions[2:], strict=True):
        assert np.abs(direction - expected).max() < 1e-6  # type: ignore[operator]


def test_a_run_is_resumed_the_way_it_was_saved(tmp_path: Path) -> None:
    for privacy, other in ((SECURE, {}), ({}, SECURE)):
        store = StateStore(str(tmp_path / "s.db"), f"run with {privacy}")
        saved = SmallFleet(table=privacy)
        list(saved.strategy(store).rounds(saved.grid(), 1))
        with pytest.raises(ConfigError, match="resume it as it was"):
            SmallFleet(table=other).strategy(store).resume()


def test_keys_and_shares_of_the_wrong_form_cost_only_their_sender_a_place() -> None:
    secure = fleet()

    def unusable(message: Message, reply: Message) -> Message:
        said = told.decode(codec.decode_answer(reply.content, 1 << 20), told.Keys)
        bad = told.Keys(said.session, replace(said.keys, masking=bytes(32)))
        return Message(codec.encode(Answered(told.encode(bad))), reply_to=message)

    def short(message: Message, reply: Message) -> Message:
        said = told.decode(codec.decode_answer(reply.content, 1 << 20), told.OpenedShares)
        bad = told.OpenedShares(said.session, dict.fromkeys(said.own_masks, b"?"), {})
        return Message(codec.encode(Answered(told.encode(bad))), reply_to=message)

    secure.apps[1] = changing(secure.apps[1], TRAIN, unusable)
    secure.apps[3] = changing(secure.apps[3], UNMASK, short)
    outcome = next(secure.strategy().rounds(secure.grid(), 1))
    assert outcome.quorate
    assert [(r.device, r.reason) for r in outcome.rejections] == [(1, "unusable public key")]
    assert outcome.summary.accepted == (0, 2, 3, 4)


def test_conflicting_options_are_refused_on_flower_too() -> None:
    made = SmallFleet(rounds=1, table={"aggregation": {"name": "trimmed"}}).strategy()
    with pytest.raises(ConfigError, match="exclude each other"):
        open_strategy(made.server, {"privacy.secure-aggregation": True})
    made = SmallFleet(rounds=1, table={**CLEAR, "limits": {"update_norm": float("inf")}}).strategy()
    with pytest.raises(ConfigError, match=r"finite limits\.update_norm"):
        open_strategy(made.server, {"privacy.secure-aggregation": True})
