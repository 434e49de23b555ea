"""The key-holder's service: whom it answers, what it rejects, and its errors for lost keys."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from fedkeep.config.method import parse_fleet
from fedkeep.core.errors import ConfigError, FedkeepError, RejectedError
from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.rounds import Rejection
from fedkeep.core.types import Profile
from fedkeep.deploy.credentials import provision
from fedkeep.keyholder.sealing import create_key, open_key, public_half, seal
from fedkeep.keyholder.service import (
    AskKey,
    AskPlan,
    KeyHolderClient,
    KeyReply,
    KeyService,
    Planned,
    PublishedKey,
    RemotePlanner,
    secured,
)
from fedkeep.protocol.addresses import Address, is_loopback
from fedkeep.protocol.messages import Failed, ProfileRequest
from fedkeep.protocol.wire import from_bytes, to_bytes
from tests.keyholder.holder_process import HolderProcess, environment, fedkeep

LABELS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("key-service")
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
def service(made: Path) -> Iterator[KeyService]:
    service = KeyService(open_key(made / "keys"), Address("127.0.0.1", 0), None)
    yield service
    service.close()


def ask(service: KeyService, request: Any) -> Any:
    """The reply, once both have crossed the wire."""
    return from_bytes(to_bytes(service.answer(to_bytes(request), "test")), KeyReply)


def profiles(count: int = 12) -> dict[int, Profile]:
    rng = np.random.default_rng(count)
    velocities = rng.lognormal(0, 0.5, (count, LABELS)) * (rng.random((count, LABELS)) < 0.7)
    capacities = rng.integers(3, 9, count).tolist()
    return {3 * row + 1: Profile(capacities[row], velocities[row]) for row in range(count)}


def sealed(published: PublishedKey, declared: dict[int, Profile]) -> dict[int, bytes]:
    asked = ProfileRequest(published.key, published.nonce)
    return {
        d: seal(published.key, replace(asked, device=d), profile) for d, profile in declared.items()
    }


def question(
    service: KeyService, declared: dict[int, Profile], greedy: Greedy = Greedy()
) -> AskPlan:
    published = ask(service, AskKey())
    return AskPlan(published.nonce, LABELS, sealed(published, declared), greedy)


def assert_same(plan: Plan, plain: Plan) -> None:
    np.testing.assert_array_equal(plan.devices, plain.devices)
    np.testing.assert_array_equal(plan.quotas, plain.quotas)
    np.testing.assert_array_equal(plan.label_weights, plain.label_weights)
    assert plan.mass_per_slot == plain.mass_per_slot
    assert plan.shortfalls == plain.shortfalls


@pytest.mark.parametrize("quantities", ["even", "frequent"])
def test_the_plan_is_the_plain_one_to_the_last_bit(service: KeyService, quantities: str) -> None:
    greedy, declared = (
        Greedy(clients_per_label=2, labels_per_client=2, quantities=quantities),
        profiles(),
    )
    planned = ask(service, question(service, declared, greedy))
    plain = greedy.plan(FleetProfiles.of(declared))
    assert_same(planned.plan, plain)
    stayed = {device: profile for device, profile in declared.items() if device != 7} | {
        99: Profile(4, np.ones(LABELS))
    }
    again = ask(service, changed(question(service, stayed, greedy), before=planned.plan))
    assert_same(again.plan, greedy.replan(plain, FleetProfiles.of(stayed)))
    assert again.refused == ()


def test_malformed_profiles_are_named_and_the_plan_goes_on_without_them(
    service: KeyService,
) -> None:
    declared = profiles()
    bad = {
        1: Profile(5, np.array([np.nan, 1.0, 1.0])),
        4: Profile(0, np.ones(LABELS)),
        7: Profile(2**40, np.ones(LABELS)),
        10: Profile(5, np.ones(LABELS + 1)),
    }
    planned = ask(service, question(service, declared | bad))
    reasons = {refusal.device: refusal.reason for refusal in planned.refused}
    assert reasons == {
        1: "velocity-not-finite",
        4: "bad-capacity",
        7: "bad-capacity",
        10: "velocity-shape",
    }
    assert_same(
        planned.plan,
        Greedy().plan(FleetProfiles.of({d: p for d, p in declared.items() if d not in bad})),
    )


def test_a_server_that_swaps_replays_or_alters_seals_gains_nothing(service: KeyService) -> None:
    declared = profiles()
    old = question(service, declared)
    new = question(service, declared)
    assert ask(service, old).reason == "outdated"
    tampered = dict(new.profiles)
    tampered[1], tampered[4] = tampered[4], tampered[1]
    tampered[7] = old.profiles[7]
    tampered[10] = tampered[10][:-1] + bytes([tampered[10][-1] ^ 1])
    tampered[13] = bytes(10 << 20)
    tampered[1000] = tampered[16]
    planned = ask(service, changed(new, profiles=tampered))
    assert {refusal.device: refusal.reason for refusal in planned.refused} == {
        **dict.fromkeys((1, 4, 7, 10, 1000), "broken seal"),
        13: "oversized",
    }
    assert not set(planned.plan.devices.tolist()) & {1, 4, 7, 10, 13, 1000}


def test_a_false_claim_counts_as_in_a_plain_plan_and_the_server_does_not_learn_who_is_fast(
    service: KeyService, caplog: pytest.LogCaptureFixture
) -> None:
    declared = profiles() | {100: Profile(10**9, np.full(LABELS, 1e20))}
    planned = ask(service, question(service, declared))
    spec = parse_fleet({"samples": {"shape": [2], "labels": LABELS}, "model": {"name": "softmax"}})
    server = replace(spec, coordinator=Greedy()).server()
    plain, cut = server.coordinate(declared)
    assert_same(planned.plan, plain)
    assert {refusal.device for refusal in cut} == {100}
    assert planned.refused == ()
    assert "device 100: a rate of 3e+20 counts as" in caplog.text


def test_only_the_servers_certificate_gets_an_answer(
    made: Path, running: HolderProcess, tmp_path: Path
) -> None:
    assert running.client.ask(AskKey(), PublishedKey).nonce
    provision(tmp_path / "foreign", ["localhost"], [], keyholder_hosts=["127.0.0.1"])
    as_keyholder = tmp_path / "as-keyholder"
    as_keyholder.mkdir()
    for name in ("crt", "key"):
        shutil.copy(made / "credentials" / f"keyholder.{name}", as_keyholder / f"planner.{name}")
    shutil.copy(made / "credentials" / "ca.crt", as_keyholder)
    nobody = ssl.create_default_context(cafile=str(made / "credentials" / "ca.crt"))
    address = Address("127.0.0.1", running.port)
    for tls in (
        secured(tmp_path / "foreign", "planner"),
        secured(as_keyholder, "planner"),
        nobody,
        None,
    ):
        with pytest.raises(FedkeepError, match="does not answer"):
            KeyHolderClient(address, tls).ask(AskKey(), PublishedKey)
    assert running.client.ask(AskKey(), PublishedKey).nonce, "it still answers the server"


def test_the_server_talks_to_no_other_host(made: Path, tmp_path: Path) -> None:
    provision(tmp_path, ["localhost"], [], keyholder_hosts=["elsewhere.example"])
    impostor = HolderProcess(made / "keys", tmp_path)
    impostor.start()
    try:
        with pytest.raises(FedkeepError, match="does not answer"):
            impostor.client.ask(AskKey(), PublishedKey)
    finally:
        impostor.kill()


def test_silent_connections_do_not_shut_the_server_out(running: HolderProcess) -> None:
    silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(6)]
    try:
        assert running.client.ask(AskKey(), PublishedKey).nonce
    finally:
        for connection in silent:
            connection.close()


def test_the_plan_crosses_the_wire_whole(running: HolderProcess) -> None:
    planner, declared = RemotePlanner(running.client, Greedy(clients_per_label=2)), profiles(4)
    asked = planner.request(0.0)
    assert asked is not None
    planner.profiles |= sealed(PublishedKey(asked.key, asked.nonce), declared)
    planned = planner.plan(0.0, declared, None, LABELS)
    assert planned is not None
    assert_same(planned.plan, Greedy(clients_per_label=2).plan(FleetProfiles.of(declared)))
    running.client.ask(
        AskKey(), PublishedKey
    )  # as a restart of the key-holder does, it ends the nonce before
    assert planner.plan(10.0, declared, None, LABELS) is None
    assert planner.plan(20.0, declared, None, LABELS) is None, "there is nothing to ask with"
    anew = planner.request(30.0)
    assert anew is not None
    assert anew.nonce != asked.nonce
    assert planner.profiles == {}, "everybody is asked anew"


def test_a_million_times_too_much_is_refused_before_it_is_read(running: HolderProcess) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as plain:
        tls = secured(running.credentials, "planner")
        with tls.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall((2**32 - 1).to_bytes(4, "big") + bytes(1000))
            assert connection.recv(1) == b"", "the connection is closed"
    assert running.client.ask(AskKey(), PublishedKey).nonce, "it still answers the server"


def test_questions_that_cannot_be_met_are_refused_with_the_reason(service: KeyService) -> None:
    good = question(service, profiles())
    before = Greedy().plan(FleetProfiles.numbered([3, 3], np.ones((2, LABELS))))
    bad: dict[str, AskPlan] = {
        "outdated": changed(good, nonce=b"none"),
        "too few devices": changed(good, profiles=dict(list(good.profiles.items())[:2])),
        "malformed plan": changed(
            good, before=replace(before, quotas=np.zeros((1, 1), dtype=np.int64))
        ),
        "malformed": changed(good, greedy={"clients_per_label": 0}),
        "error": changed(good, greedy=Greedy(quantities="none such")),
    }
    for reason, request in bad.items():
        reply = ask(service, request)
        assert isinstance(reply, Failed), reason
        assert reply.reason == reason
    beyond = ask(service, question(service, profiles(3) | {2**63: Profile(1, np.ones(LABELS))}))
    assert beyond.reason == "error", "no fleet numbers its devices so"
    good = question(service, profiles())
    assert isinstance(service.answer(b"no message", "test"), Failed)
    assert isinstance(service.answer(to_bytes(good)[:-1], "test"), Failed)
    assert isinstance(ask(service, changed(good, before=before)), Planned)


def test_where_too_few_are_left_the_offenders_are_named_all_the_same(service: KeyService) -> None:
    declared = profiles(3) | {4: Profile(0, np.ones(LABELS))}
    reply = ask(service, question(service, declared))
    assert reply.reason == "too few devices"
    assert (
        "a plan for 2 would tell of each: at least 3 are needed; device 4: bad-capacity"
        in reply.detail
    )


def test_a_lost_key_is_one_sentence(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "keys", tmp_path / "keys")
    (tmp_path / "keys" / "secret.key").unlink()
    command = fedkeep(
        "keyholder", "serve", str(tmp_path / "keys"), "--insecure", "--listen", "127.0.0.1:0"
    )
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("fedkeep: lost key: ")
    assert "put it back, or make another by `fedkeep keyholder create`" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_command_line_makes_keys_and_prints_what_devices_need(tmp_path: Path) -> None:
    printed = []
    for command in ("create", "show"):
        words = fedkeep("keyholder", command, str(tmp_path / "keys"))
        ended = subprocess.run(
            words, env=environment(), capture_output=True, text=True, check=True, timeout=300
        )
        printed.append(ended.stdout)
    key = public_half(open_key(tmp_path / "keys")).hex()
    assert f'[privacy]\nencrypted_profiles = true\npublic_key = "{key}"' in printed[0] == printed[1]


def test_what_is_not_secured_stays_on_loopback(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loopback only"):
        KeyService(open_key(made / "keys"), Address("0.0.0.0", 0), None)
    with pytest.raises(ConfigError, match="provision"):
        secured(tmp_path, "planner")


def test_plans_for_others_are_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    class Lying(KeyHolderClient):
        def ask(self, request: Any, expected: Any) -> Any:
            return (
                PublishedKey(bytes(32), bytes(16)) if isinstance(request, AskKey) else invalid.pop()
            )

    good = Greedy().plan(FleetProfiles.numbered([3, 3], np.ones((2, LABELS))))
    wide = replace(
        good, quotas=np.zeros((2, LABELS + 1), dtype=np.int64), label_weights=np.ones(LABELS + 1)
    )
    wrong = (replace(good, devices=np.array([7, 8])), wide, replace(good, quotas=-good.quotas))
    invalid = [Planned(plan, ()) for plan in wrong]
    invalid += [
        Planned(good, (Rejection(device, "refused", "and planned for, or never asked"),))
        for device in (1, 9)
    ]
    while invalid:
        planner = RemotePlanner(Lying(Address("127.0.0.1", 1), None), Greedy())
        assert planner.request(0.0) is not None
        planner.profiles |= {0: b"", 1: b""}
        assert planner.plan(0.0, (0, 1), None, LABELS) is None
    assert caplog.text.count("malformed plan") == 5


@pytest.mark.parametrize("text", ["", "host", "host:", ":9600", "host:nine", "host:70000"])
def test_addresses_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Address.parse(text)


def test_addresses_of_version_six() -> None:
    assert Address.parse("[::1]:9600") == Address("::1", 9600)
    assert str(Address("::1", 9600)) == "[::1]:9600"
    assert is_loopback("::1")


def test_what_is_no_reply_is_refused() -> None:
    with pytest.raises(RejectedError, match="malformed"):
        from_bytes(to_bytes(AskKey()), KeyReply)
