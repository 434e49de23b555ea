"""Profiles the server cannot read: a real key-holder process and devices, Flower's messages."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.app.user_config import UserConfig

from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.planning.greedy import Greedy, Uncoordinated
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.types import Profile
from fedkeep.deploy.credentials import provision
from fedkeep.flower import codec
from fedkeep.flower.codec import PROFILE
from fedkeep.flower.rounds import RoundOptions
from fedkeep.flower.server_app import open_strategy
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.strategy import FedkeepStrategy
from fedkeep.keyholder import service as planning
from fedkeep.keyholder.sealing import create_key, open_key, public_half, seal, unseal
from fedkeep.keyholder.service import RemotePlanner
from fedkeep.protocol.messages import AskProfile, Profiled, ProfileRequest
from tests.flower.in_process import InProcessGrid
from tests.flower.small_fleet import App, SmallFleet
from tests.keyholder.holder_process import HolderProcess

pytest.importorskip("cryptography", reason="needs the privacy extra")

FAST = RoundOptions(participation=0.5, deadline=5.0)
GREEDY = Greedy()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys and credentials."""
    root = tmp_path_factory.mktemp("key-holder")
    create_key(root / "keys")
    provision(root / "credentials", ["localhost"], [], keyholder_hosts=["127.0.0.1"])
    return root


@pytest.fixture(scope="module")
def running(made: Path) -> Iterator[HolderProcess]:
    holder = HolderProcess(made / "keys", made / "credentials")
    holder.start()
    yield holder
    holder.kill()


@pytest.fixture
def own(made: Path) -> Iterator[HolderProcess]:
    """A key-holder that a test may kill."""
    holder = HolderProcess(made / "keys", made / "credentials")
    yield holder
    holder.kill()


def sealed(made: Path, further: dict[str, Any] | None = None, **fields: Any) -> SmallFleet:
    """A fleet whose devices encrypt their profiles under the key-holder's key."""
    privacy = {
        **(further or {}),
        "encrypted_profiles": True,
        "public_key": public_half(open_key(made / "keys")).hex(),
    }
    return SmallFleet(table={"privacy": privacy}, **{"options": FAST, **fields})


def planner(holder: HolderProcess) -> RemotePlanner:
    return RemotePlanner(holder.client, GREEDY)


def plain_plan(fleet: SmallFleet, *leavers: int) -> Plan:
    """What greedy plans from the same profiles in the clear."""
    clear = SmallFleet(devices=fleet.devices, seed=fleet.seed)
    profiles = {d: clear.restarted(d).profile() for d in range(fleet.devices)}
    plan = GREEDY.plan(FleetProfiles.of(profiles))
    if leavers:
        plan = GREEDY.replan(
            plan, FleetProfiles.of({d: p for d, p in profiles.items() if d not in leavers})
        )
    return plan


def assert_same(plan: Plan | None, plain: Plan) -> None:
    assert plan is not None
    np.testing.assert_array_equal(plan.devices, plain.devices)
    np.testing.assert_array_equal(plan.quotas, plain.quotas)
    np.testing.assert_array_equal(plan.label_weights, plain.label_weights)
    assert plan.mass_per_slot == plain.mass_per_slot


def test_the_plan_equals_the_plain_one_and_rounds_are_played(
    made: Path, running: HolderProcess
) -> None:
    fleet = sealed(made)
    strategy = fleet.strategy(planner=planner(running), options=replace(FAST, min_devices=6))
    outcomes = list(strategy.rounds(fleet.grid(), 3))
    assert_same(strategy.server.plan, plain_plan(fleet))
    assert all(outcome.summary.accepted and outcome.quorate for outcome in outcomes)
    assert not any(outcome.rejections for outcome in outcomes)
    assert np.isnan(strategy._membership.entries[0].profile.velocity).all(), (
        "the server knows no velocity"
    )


def test_with_secure_sums_the_server_sees_neither_profile_nor_report(
    made: Path, running: HolderProcess
) -> None:
    fleet = sealed(made, {"secure_aggregation": True})
    strategy = fleet.strategy(planner=planner(running), options=replace(FAST, min_devices=6))
    before = strategy.server.model.copy()
    outcomes = list(strategy.rounds(fleet.grid(), 2))
    assert_same(strategy.server.plan, plain_plan(fleet))
    assert all(outcome.summary.accepted and not outcome.rejections for outcome in outcomes)
    assert not np.array_equal(before, strategy.server.model)


class WatchedGrid(InProcessGrid):
    """Counts who was asked for a profile."""

    def __init__(self, grid: InProcessGrid) -> None:
        super().__init__(grid.nodes.values())
        self.asked: list[int] = []

    def push_messages(self, messages: Any) -> list[str]:
        listed = list(messages)
        self.asked += [
            m.metadata.dst_node_id - 1000 for m in listed if m.metadata.message_type == PROFILE
        ]
        return super().push_messages(listed)


def test_devices_come_and_go_and_only_newcomers_are_asked(
    made: Path, running: HolderProcess
) -> None:
    fleet = sealed(made)
    grid = WatchedGrid(fleet.grid())
    away = {node: grid.nodes.pop(node) for node in (1002, 1005)}
    strategy = fleet.strategy(planner=planner(running))
    rounds = strategy.rounds(grid, 10)
    next(rounds)
    assert strategy.server.plan is not None
    assert strategy.server.plan.devices.tolist() == [0, 1, 3, 4]
    grid.nodes |= away
    for _ in range(2):
        next(rounds)
    assert strategy.server.plan.devices.tolist() == list(range(6))
    assert sorted(grid.asked) == list(range(6)), "each device was asked once"
    del grid.nodes[1001]
    next(rounds)
    assert strategy.server.plan.devices.tolist() == [0, 2, 3, 4, 5]
    assert len(grid.asked) == 6, "nobody is asked again because another left"


def test_a_leaver_changes_the_plan_as_in_the_clear(made: Path, running: HolderProcess) -> None:
    fleet = sealed(made)
    grid = fleet.grid()
    strategy = fleet.strategy(planner=planner(running), options=replace(FAST, min_devices=6))
    rounds = strategy.rounds(grid, 3)
    next(rounds)
    del grid.nodes[1004]
    next(rounds)
    assert_same(strategy.server.plan, plain_plan(fleet, 4))


def in_the_clear(fleet: SmallFleet, number: int) -> App:
    clear = SmallFleet(devices=fleet.devices)

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == PROFILE:
            return Message(
                codec.encode(Profiled(clear.restarted(number).profile(), number)), reply_to=message
            )
        return fleet.apps[number](message, context)

    return app


def tampered(app: App, change: Callable[[dict[str, Any]], dict[str, Any]]) -> App:
    """The app, its encrypted answer changed on the way."""

    def changed(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == PROFILE and not reply.has_error():
            return Message(codec.encode(change(codec.decode(reply.content, Any))), reply_to=message)
        return reply

    return changed


def broken(sealed: bytes) -> bytes:
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "too large": (lambda v: {**v, "profile": bytes(10 << 20)}, "oversized"),
    "no bytes": (lambda v: {**v, "profile": 7}, "malformed"),
    "half an answer": (lambda v: {"type": v["type"], "nonce": v["nonce"]}, "malformed"),
    "another's number": (lambda v: {**v, "device": 0}, "identity-taken"),
    "altered": (lambda v: {**v, "profile": broken(v["profile"])}, "broken seal"),
    "truncated": (lambda v: {**v, "profile": v["profile"][:-1]}, "broken seal"),
    "nothing": (lambda v: {**v, "profile": b""}, "unusable public key"),
}


def test_answers_that_cannot_count_are_refused_by_name_and_the_rest_goes_on(
    made: Path, running: HolderProcess
) -> None:
    fleet = sealed(made, devices=4 + len(BAD))
    for number, (change, _) in enumerate(BAD.values(), start=4):
        fleet.apps[number] = tampered(fleet.apps[number], change)
    fleet.apps[3] = in_the_clear(fleet, 3)
    strategy = fleet.strategy(planner=planner(running))
    outcome = next(strategy.rounds(fleet.grid(), 1))
    refused = {refusal.device % 1000: refusal.reason for refusal in outcome.rejections}
    assert refused == dict(
        enumerate(["profile in the clear", *(reason for _, reason in BAD.values())], start=3)
    )
    assert strategy.server.plan is not None
    assert strategy.server.plan.devices.tolist() == [0, 1, 2]
    assert outcome.summary.accepted


LIES = {
    "velocity-not-finite": Profile(6, np.array([1.0, np.nan, 1.0, 1.0])),
    "negative-velocity": Profile(6, np.array([1.0, -1.0, 1.0, 1.0])),
    "velocity-shape": Profile(6, np.ones(5)),
    "velocity-dtype": Profile(6, np.ones(4, dtype=np.float32)),
    "bad-capacity": Profile(2**40, np.ones(4)),
    "oversized": Profile(6, np.ones(90)),
}


def test_lies_under_the_seal_are_named_and_the_rounds_go_on_without_them(
    made: Path, running: HolderProcess
) -> None:
    fleet, public = sealed(made, devices=3 + len(LIES)), public_half(open_key(made / "keys"))

    def resealed(number: int, lie: Profile, said: dict[str, Any]) -> dict[str, Any]:
        return {**said, "profile": seal(public, ProfileRequest(public, said["nonce"], number), lie)}

    for number, lie in enumerate(LIES.values(), start=3):
        fleet.apps[number] = tampered(fleet.apps[number], partial(resealed, number, lie))
    strategy, grid = fleet.strategy(planner=planner(running)), WatchedGrid(fleet.grid())
    outcomes = list(strategy.rounds(grid, 3))
    assert {r.device: r.reason for r in outcomes[0].rejections} == dict(enumerate(LIES, start=3))
    assert not any(outcome.rejections for outcome in outcomes[1:]), (
        "they are named once, and asked again later"
    )
    assert all(outcome.summary.accepted for outcome in outcomes)
    assert len(grid.asked) == fleet.devices
    assert strategy.server.plan is not None
    assert strategy.server.plan.devices.tolist() == [0, 1, 2]


def test_a_server_that_asks_for_another_devices_seal_gets_that_of_the_device_asked(
    made: Path,
) -> None:
    fleet, public = sealed(made), public_half(open_key(made / "keys"))
    asked = codec.encode(AskProfile(ProfileRequest(public, bytes(16), device=5)))
    grid = fleet.grid()
    (reply,) = grid.send_and_receive([Message(asked, 1002, PROFILE)])
    said, device = codec.decode_encrypted_profile(codec.content_of(reply), 4)
    secret = open_key(made / "keys")
    assert device == 2
    assert unseal(secret, bytes(16), 2, said.profile, 4).capacity == 6
    with pytest.raises(RejectedError, match="broken seal"):
        unseal(secret, bytes(16), 5, said.profile, 4)


def test_a_device_sends_nothing_in_the_clear_nor_under_another_key(made: Path) -> None:
    device = sealed(made).restarted(0)
    with pytest.raises(RejectedError, match=r"in the clear.*nothing was sent"):
        device.profile()
    with pytest.raises(RejectedError, match=r"another key.*nothing was sent"):
        device.encrypted_profile(ProfileRequest(b"the server's own", bytes(16), 0))
    with pytest.raises(RejectedError, match=r"no key for it: nothing was sent"):
        SmallFleet().restarted(0).encrypted_profile(ProfileRequest(b"any", bytes(16), 0))
    with pytest.raises(ConfigError, match=r"need privacy\.public_key"):
        SmallFleet(table={"privacy": {"encrypted_profiles": True}}).restarted(0)


def test_a_server_that_asks_in_the_clear_learns_nothing(made: Path) -> None:
    fleet = sealed(made)
    replies: list[Message] = []
    strategy, grid = fleet.strategy(), fleet.grid()
    strategy._membership.poll(exchange := _recording(grid, replies))
    for asked, reply in exchange.arrived():
        strategy._greet(asked, reply)
    assert len(replies) == fleet.devices
    assert all(
        reply.has_error() and "nothing was sent" in str(reply.error.reason) for reply in replies
    )
    assert not strategy._membership.online


def _recording(grid: InProcessGrid, replies: list[Message]) -> Any:
    from fedkeep.flower.exchange import Exchange

    class Recording(Exchange):
        def arrived(self) -> Iterator[Any]:
            for asked, reply in super().arrived():
                replies.append(reply)
                yield asked, reply

    return Recording(grid)


def test_without_a_key_holder_the_run_waits_and_says_so_then_goes_on(
    made: Path,
    own: HolderProcess,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "_RETRY_SECONDS", 0.2)
    fleet = sealed(made)
    grid = WatchedGrid(fleet.grid())
    strategy = fleet.strategy(planner=planner(own))
    caplog.set_level(logging.WARNING, "fedkeep")
    late = threading.Timer(2.0, own.start)
    late.start()
    try:
        outcome = next(strategy.rounds(grid, 1))
    finally:
        late.join()
    waits = [
        r.getMessage()
        for r in caplog.records
        if "no plan from encrypted profiles yet" in r.getMessage()
    ]
    assert len(waits) == 1, "it is said once"
    assert f"the key-holder at 127.0.0.1:{own.port} does not answer" in waits[0]
    assert "nothing in the clear" in waits[0]
    assert outcome.summary.accepted


def test_a_killed_key_holder_stops_no_round_and_a_restarted_one_plans_again(
    made: Path, own: HolderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_RETRY_SECONDS", 0.0)
    own.start()
    fleet = sealed(made)
    grid = fleet.grid()
    newcomer = grid.nodes.pop(1003)
    strategy = fleet.strategy(planner=planner(own))
    rounds = strategy.rounds(grid, 10)
    next(rounds)
    own.kill()
    grid.nodes[newcomer.node_id] = newcomer
    outcome = next(rounds)
    assert outcome.summary.accepted
    assert 3 not in outcome.summary.participants, "it waits for a plan"
    assert strategy.server.plan is not None
    assert strategy.server.plan.devices.tolist() == [0, 1, 2, 4, 5]
    own.start()
    for _ in range(2):  # the restarted one has another nonce, for which everybody is asked anew
        next(rounds)
    assert strategy.server.plan.devices.tolist() == list(range(6))


def test_new_keys_are_refused_by_the_devices_and_the_old_plan_stays(
    made: Path, own: HolderProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_RETRY_SECONDS", 0.0)
    own.start()
    fleet = sealed(made)
    grid = fleet.grid()
    newcomer = grid.nodes.pop(1003)
    strategy = fleet.strategy(planner=planner(own))
    rounds = strategy.rounds(grid, 10)
    next(rounds)
    own.kill()
    create_key(tmp_path / "other")
    own.keys = tmp_path / "other"
    own.start()
    grid.nodes[newcomer.node_id] = newcomer
    refusals = {
        (r.device, r.detail.split(":")[1].strip())
        for _ in range(3)
        for r in next(rounds).rejections
    }
    assert {device for device, _ in refusals} >= {0, 1, 2, 4, 5}
    assert any("another key" in reason for _, reason in refusals)
    assert strategy.server.plan is not None
    assert strategy.server.plan.devices.tolist() == [0, 1, 2, 4, 5]


def test_a_resumed_server_asks_nobody_while_the_fleet_is_the_same(
    made: Path, running: HolderProcess, tmp_path: Path
) -> None:
    fleet = sealed(made, directory=tmp_path / "devices")
    options = replace(FAST, min_devices=6)

    def server() -> FedkeepStrategy:
        return fleet.strategy(
            StateStore(str(tmp_path / "state.db"), "run"), options, planner(running)
        )

    first = server()
    list(first.rounds(fleet.grid(), 2))
    second = server()
    assert second.resume()
    grid = WatchedGrid(fleet.grid())
    rounds = second.rounds(grid, 5)
    next(rounds)
    assert grid.asked == []
    assert_same(second.server.plan, plain_plan(fleet))
    del grid.nodes[1002]
    next(rounds)
    assert sorted(grid.asked) == [0, 1, 3, 4, 5], "a new table needs everybody"
    assert_same(second.server.plan, plain_plan(fleet, 2))


def test_too_few_devices_are_not_planned_for(
    made: Path, running: HolderProcess, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = sealed(made, devices=2)
    strategy = fleet.strategy(planner=planner(running))
    grid, membership = fleet.grid(), strategy._membership
    exchange = _recording(grid, [])
    caplog.set_level(logging.WARNING, "fedkeep")
    for _ in range(2):
        membership.poll(exchange)
        for asked, reply in exchange.arrived():
            strategy._greet(asked, reply)
        membership.plan()
    assert strategy.server.plan is None
    assert "at least 3 are needed" in caplog.text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "needs keyholder.address"),
        ({"keyholder.address": "127.0.0.1:1"}, "and not both"),
        ({"keyholder.address": "nowhere", "keyholder.insecure": True}, "HOST:PORT"),
        ({"keyholder.address": "10.0.0.1:9600", "keyholder.insecure": True}, "loopback"),
        ({"keyholder.address": "10.0.0.1:9600", "keyholder.credentials": "none"}, "is not there"),
        ({"keyholder.adress": "127.0.0.1:1"}, "did you mean"),
    ],
)
def test_the_server_refuses_a_key_holder_it_cannot_trust(settings: UserConfig, reason: str) -> None:
    fleet = SmallFleet()
    strategy = fleet.strategy()
    with pytest.raises(ConfigError, match=reason):
        open_strategy(strategy.server, {"privacy.encrypted-profiles": True, **settings})


def test_other_coordinators_cannot_plan_unseen(running: HolderProcess) -> None:
    with pytest.raises(ConfigError, match="greedy"):
        RemotePlanner(running.client, Uncoordinated())
