"""Rounds, devices that come and go, runs that resume: over an in-process grid."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.app.user_config import UserConfig

from fedkeep.core.errors import ConfigError
from fedkeep.flower.codec import ARRAYS, HEAD, decode_report, encode
from fedkeep.flower.rounds import RoundOptions
from fedkeep.flower.server_app import open_strategy
from fedkeep.flower.state_store import StateStore
from fedkeep.protocol.messages import Reported
from fedkeep.sim.engine import Simulator
from tests.flower.in_process import InProcessGrid, make_node
from tests.flower.small_fleet import App, SmallFleet

FAST = RoundOptions(participation=0.5, deadline=0.3)


class LossyGrid(InProcessGrid):
    """Loses every reply of some nodes, or holds it back until it is let go."""

    def __init__(self, grid: InProcessGrid) -> None:
        super().__init__(grid.nodes.values())
        self.silent: set[int] = set()
        self.held: list[Message] = []

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        self.held += [reply for reply in replies if reply.metadata.src_node_id in self.silent]
        return [reply for reply in replies if reply.metadata.src_node_id not in self.silent]


class LateGrid(LossyGrid):
    """Lets go of what it held back once nobody is silent any more."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        released = [] if self.silent else self.held
        self.held = self.held if self.silent else []
        return [*replies, *released]


@pytest.mark.parametrize(
    ("policy", "preset"),
    [
        ("ode", "default"),
        ("ode", "paper"),
        ("balanced-reservoir", "default"),
        ("balanced-reservoir", "paper"),
    ],
)
def test_the_same_model_as_the_simulator(policy: str, preset: str) -> None:
    fleet = SmallFleet(rounds=6, policy=policy, table={"preset": preset})
    strategy = fleet.strategy()
    assert len(list(strategy.rounds(fleet.grid(), 6))) == 6
    simulator = Simulator(fleet.experiment)
    list(simulator.run())
    assert np.abs(strategy.server.model - simulator.server.model).max() < 1e-6
    assert np.abs(strategy.server.model).max() > 1e-3


@pytest.mark.parametrize("gist", ["local", "shared"])
def test_the_same_model_as_the_simulator_with_every_gist(gist: str) -> None:
    fleet = SmallFleet(rounds=6, policy="balanced-reservoir", table={"gist": {"mode": gist}})
    strategy = fleet.strategy()
    list(strategy.rounds(fleet.grid(), 6))
    simulator = Simulator(fleet.experiment)
    list(simulator.run())
    assert np.abs(strategy.server.model - simulator.server.model).max() < 1e-6


class ListeningGrid(InProcessGrid):
    """Keeps all that crosses it, both ways."""

    def __init__(self, grid: InProcessGrid) -> None:
        super().__init__(grid.nodes.values())
        self.heard: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        ids = super().push_messages(sent)
        self.heard += [*sent, *(self._replies[key] for key in ids)]
        return ids


def test_a_local_gist_leaves_nothing_new_on_the_wire() -> None:
    heard = {}
    for gist in ("none", "local"):
        fleet = SmallFleet(rounds=4, policy="balanced-reservoir", table={"gist": {"mode": gist}})
        grid = ListeningGrid(fleet.grid())
        list(fleet.strategy().rounds(grid, 4))
        heard[gist] = grid.heard
    changed = 0
    for plain, mended in zip(heard["none"], heard["local"], strict=True):
        assert plain.metadata.message_type == mended.metadata.message_type
        assert plain.content[HEAD] == mended.content[HEAD], "the same head, byte by byte"
        sizes = [
            [
                (array.dtype, array.shape, len(array.data))
                for array in message.content.array_records[ARRAYS].values()
            ]
            for message in (plain, mended)
        ]
        assert sizes[0] == sizes[1]
        changed += plain.content != mended.content
    assert changed, "the models differ: the gist did mend"


@pytest.mark.parametrize("policy", ["reservoir", "fifo", "high-loss"])
def test_other_policies_too(policy: str) -> None:
    fleet = SmallFleet(policy=policy)
    strategy = fleet.strategy()
    list(strategy.rounds(fleet.grid(), 4))
    simulator = Simulator(fleet.experiment)
    list(simulator.run())
    assert np.abs(strategy.server.model - simulator.server.model).max() < 1e-6


def test_flowers_entry_point_gives_results_by_round() -> None:
    fleet = SmallFleet()
    strategy = fleet.strategy(options=replace(fleet.options, evaluate_every=2))
    result = strategy.start(fleet.grid(), num_rounds=4)
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert list(result.evaluate_metrics_clientapp) == [2, 4]
    accuracy = result.evaluate_metrics_clientapp[4]["accuracy"]
    assert isinstance(accuracy, float)
    assert 0 <= accuracy <= 1
    assert result.arrays["model"].numpy().tobytes() == strategy.server.model.tobytes()


def test_flowers_entry_point_takes_a_first_model_and_a_measure_of_ones_own() -> None:
    fleet, seen = SmallFleet(), dict[int, bytes]()
    strategy = fleet.strategy()
    first = np.full_like(strategy.server.model, 0.25)

    def measure(round_: int, arrays: ArrayRecord) -> MetricRecord:
        seen[round_] = arrays["model"].numpy().tobytes()
        return MetricRecord({"round": round_})

    with pytest.raises(ConfigError, match="expected one array 'model'"):
        strategy.start(fleet.grid(), ArrayRecord({"weights": Array(first)}))
    result = strategy.start(
        fleet.grid(), ArrayRecord({"model": Array(first)}), 2, evaluate_fn=measure
    )
    assert list(result.evaluate_metrics_serverapp) == list(seen) == [1, 2]
    assert seen[2] == strategy.server.model.tobytes()
    plain = SmallFleet().strategy()
    plain.server.set_model(first)
    list(plain.rounds(SmallFleet().grid(), 2))
    assert plain.server.model.tobytes() == seen[2]


def test_more_devices_are_asked_than_are_waited_for() -> None:
    fleet = SmallFleet(devices=10, options=replace(FAST, deadline=600.0))
    grid = LossyGrid(fleet.grid())
    rounds = fleet.strategy().rounds(grid, 4)
    chosen = next(rounds).summary.participants
    assert len(chosen) == 7
    grid.silent = {1000, 1001}
    outcome = next(rounds)
    assert len(outcome.summary.accepted) >= 5
    assert set(outcome.summary.missing) <= {0, 1}


def test_a_round_closes_at_its_deadline_with_the_quorum() -> None:
    fleet = SmallFleet(devices=4, options=replace(FAST, participation=1.0, quorum=0.5))
    strategy, grid = fleet.strategy(), LossyGrid(fleet.grid())
    rounds = strategy.rounds(grid, 4)
    next(rounds)
    grid.silent = {1002}
    outcome = next(rounds)
    assert outcome.summary.missing == (2,)
    assert outcome.quorate
    assert outcome.seconds < 5


def test_without_a_quorum_a_round_changes_nothing_and_the_run_goes_on() -> None:
    fleet = SmallFleet(devices=4, options=replace(FAST, participation=1.0, quorum=1.0))
    strategy, grid = fleet.strategy(), LossyGrid(fleet.grid())
    rounds = strategy.rounds(grid, 4)
    next(rounds)
    before = strategy.server.model.copy()
    grid.silent = {1002}
    outcome = next(rounds)
    assert not outcome.quorate
    assert strategy.server.model.tobytes() == before.tobytes()
    assert strategy.server.round == 2


def test_a_late_report_counts_for_the_estimator_only() -> None:
    """A reply to round 1 that comes in round 2 moves no model; its gradient counts."""
    fleet = SmallFleet(devices=3, options=replace(FAST, participation=1.0, quorum=0.0))
    strategy, grid = fleet.strategy(), LateGrid(fleet.grid())
    rounds = strategy.rounds(grid, 4)
    next(rounds)
    grid.silent = {1001}
    outcome = next(rounds)
    assert outcome.summary.missing == (1,)
    grid.silent = set()
    outcome = next(rounds)
    late = [refusal for refusal in outcome.rejections if refusal.device == 1]
    assert [refusal.reason for refusal in late] == ["late"]
    assert 1 in outcome.summary.accepted


def test_a_device_that_joins_is_planned_for_and_one_that_leaves_is_replaced() -> None:
    fleet = SmallFleet(devices=6, options=replace(FAST, participation=1.0))
    strategy, grid = fleet.strategy(), fleet.grid()
    joining, leaving = grid.nodes.pop(1005), 1000
    rounds = strategy.rounds(grid, 6)
    next(rounds)
    assert strategy.server.plan is not None
    assert strategy.server.plan.devices.tolist() == [0, 1, 2, 3, 4]
    held = strategy.server.plan.holders
    grid.nodes[1005] = joining
    del grid.nodes[leaving]
    next(rounds)
    assert strategy.server.plan.devices.tolist() == [1, 2, 3, 4, 5]
    assert (strategy.server.plan.holders >= np.minimum(held, 1)).all()


def test_waiting_for_devices_is_told_once_for_each_that_comes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedkeep.flower.strategy._PAUSE_SECONDS", 0.01)
    caplog.set_level("INFO", "fedkeep")
    fleet = SmallFleet(devices=3, options=replace(FAST, participation=1.0, min_devices=3))
    grid, looks = fleet.grid(), iter(range(100))
    nodes = list(grid.nodes.values())
    monkeypatch.setattr(grid, "get_nodes", lambda: nodes[: 1 + next(looks) // 10])
    next(fleet.strategy().rounds(grid, 1))
    waits = [
        record.getMessage()
        for record in caplog.records
        if "waiting for devices" in record.getMessage()
    ]
    assert waits == [f"waiting for devices: {n} of 3 are online" for n in range(3)][-len(waits) :]


def test_a_node_that_comes_back_with_its_key_is_the_same_device() -> None:
    fleet = SmallFleet(devices=3, options=replace(FAST, participation=1.0))
    strategy, grid = fleet.strategy(), fleet.grid()
    rounds = strategy.rounds(grid, 4)
    next(rounds)
    node = grid.nodes.pop(1001)
    node.node_id = 2001
    grid.nodes[2001] = node
    outcome = next(rounds)
    assert outcome.summary.participants == (0, 1, 2)
    assert outcome.rejections == ()


def test_another_key_cannot_take_a_devices_number() -> None:
    fleet = SmallFleet(devices=3, options=replace(FAST, participation=1.0))
    strategy, grid = fleet.strategy(), fleet.grid()
    rounds = strategy.rounds(grid, 4)
    next(rounds)
    del grid.nodes[1001]
    thief = make_node(1, fleet.apps[1], {})
    thief.node_id, thief.public_key = 3001, b"another key"
    grid.nodes[3001] = thief
    next(rounds)
    outcome = next(rounds)
    assert 1 not in outcome.summary.participants


def test_an_empty_store_is_participation_not_failure() -> None:
    fleet = SmallFleet(table={"stream": {"rounds_per_pass": 1000}})
    outcome = next(fleet.strategy().rounds(fleet.grid(), 1))
    assert len(outcome.summary.empty) == 3
    assert outcome.quorate
    assert outcome.rejections == ()


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = SmallFleet(rounds=6)
    reference = whole.strategy()
    list(reference.rounds(whole.grid(), 6))
    fleet = SmallFleet(rounds=6, directory=tmp_path / "devices")
    for stop in (1, 2, 4, 6):
        strategy = fleet.strategy(StateStore(str(tmp_path / "s.db"), "run"))
        strategy.resume()
        list(strategy.rounds(fleet.grid(), stop))
    assert strategy.server.model.tobytes() == reference.server.model.tobytes()


def test_a_round_that_was_not_saved_is_played_again_to_the_same_bits(tmp_path: Path) -> None:
    """The server dies between training and commit: devices answer the same again."""
    whole = SmallFleet(rounds=5)
    reference = whole.strategy()
    list(reference.rounds(whole.grid(), 5))
    fleet = SmallFleet(rounds=5, directory=tmp_path / "devices")
    first = fleet.strategy(StateStore(str(tmp_path / "s.db"), "run"))
    list(first.rounds(fleet.grid(), 2))
    first.store = None
    next(first.rounds(fleet.grid(), 3))
    second = fleet.strategy(StateStore(str(tmp_path / "s.db"), "run"))
    assert second.resume()
    assert second.server.round == 2
    list(second.rounds(fleet.grid(), 5))
    assert second.server.model.tobytes() == reference.server.model.tobytes()


def test_a_saved_run_is_not_begun_anew_by_mistake(tmp_path: Path) -> None:
    fleet = SmallFleet(rounds=1)
    config: UserConfig = {"state.url": str(tmp_path / "s.db"), "rounds.deterministic": True}
    made = fleet.strategy()
    list(open_strategy(made.server, config).rounds(fleet.grid(), 1))
    again = fleet.strategy()
    with pytest.raises(ConfigError, match="saved already"):
        open_strategy(again.server, config)
    resumed = open_strategy(again.server, {**config, "state.resume": True})
    assert resumed.server.round == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rounds.dedline": 3.0}, "deadline"),
        ({"rounds.deadline": -1.0}, "deadline must be above 0"),
        ({"rounds.identity": "name"}, "identity"),
        ({"state.resume": True}, "state.url"),
    ],
)
def test_a_wrong_setting_is_named(config: UserConfig, said: str) -> None:
    made = SmallFleet(rounds=1).strategy()
    with pytest.raises(ConfigError, match=said):
        open_strategy(made.server, config)


def replaying(app: App, parameters: int) -> App:
    """Sends the report of an earlier round again."""
    first: list[Message] = []

    def run(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type != "train":
            return reply
        first.append(reply)
        report = decode_report(first[0].content, parameters)
        return Message(encode(Reported(report)), reply_to=message)

    return run


def test_a_replayed_report_is_refused() -> None:
    fleet = SmallFleet(devices=3, options=replace(FAST, participation=1.0))
    strategy = fleet.strategy()
    fleet.apps[1] = replaying(
        fleet.apps[1], len(strategy.server.model) + strategy.server.gradient_size
    )
    rounds = strategy.rounds(fleet.grid(), 3)
    assert next(rounds).rejections == ()
    assert [(r.device, r.reason) for r in next(rounds).rejections] == [(1, "replayed")]
