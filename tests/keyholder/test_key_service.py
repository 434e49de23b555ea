"""The key-holder's door: whom it answers, what it refuses, and what it says when a key is lost."""

import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.core.coordination import Greedy
from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.fleet import Fleet
from fedkeep.core.types import Profile
from fedkeep.deploy.credentials import provision
from fedkeep.keyholder.ckks import COARSE
from fedkeep.keyholder.parties import EncryptedFleet, KeyDirectory, PublicContext, encrypt_profile
from fedkeep.keyholder.planner import KeyHolderClient, KeyHolderUnreachableError, RemotePlanner
from fedkeep.keyholder.port import (
    AskPlan,
    AskPublicKeys,
    EncryptedTables,
    KeyReply,
    Planned,
    PublishedKeys,
    planner_side,
)
from fedkeep.keyholder.service import KeyService
from fedkeep.link.addresses import Address
from fedkeep.link.messages import Failed
from fedkeep.link.wire import from_bytes, to_bytes
from tests.keyholder.holder_process import HolderProcess, environment, fedkeep

LABELS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("key-service")
    KeyDirectory(root / "keys").create(COARSE)
    provision(root / "credentials", ["localhost"], [], keyholder_hosts=["127.0.0.1"])
    return root


@pytest.fixture(scope="module")
def running(made: Path) -> Iterator[HolderProcess]:
    holder = HolderProcess(made / "keys", made / "credentials")
    holder.start()
    yield holder
    holder.kill()


@pytest.fixture(scope="module")
def tables(made: Path) -> EncryptedTables:
    keys = KeyDirectory(made / "keys")
    fleet = EncryptedFleet(PublicContext.unpack(keys.for_server.read_bytes()), 4, LABELS)
    for device in range(4):
        profile = Profile(5, np.array([1.0, 10.0, 100.0]) * (device + 1))
        fleet.receive(device, device, encrypt_profile(keys.public(), fleet.request(device), profile))
    return fleet.tables(range(4))


def question(tables: EncryptedTables) -> AskPlan:
    return AskPlan(tables, quantities="even", clients_per_label=2, labels_per_client=None)


def test_secret_keys_are_for_their_owner_and_nothing_secret_is_published(made: Path) -> None:
    keys = made / "keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert {stat.S_IMODE((keys / f"{name}.key").stat().st_mode) for name in ("comparing", "summing")} == {0o600}
    from fedkeep.keyholder import ckks

    for file in ("devices.context", "server.context"):
        public = PublicContext.unpack((keys / file).read_bytes())
        assert not ckks.read_context(public.comparing).has_secret_key()
        assert not ckks.read_context(public.summing).has_secret_key()


def test_only_the_servers_certificate_gets_an_answer(made: Path, running: HolderProcess, tmp_path: Path) -> None:
    assert running.client.ask(AskPublicKeys(), PublishedKeys).least_devices == 3
    provision(tmp_path / "foreign", ["localhost"], [], keyholder_hosts=["127.0.0.1"])
    as_keyholder = tmp_path / "as-keyholder"
    as_keyholder.mkdir()
    for name in ("crt", "key"):
        shutil.copy(made / "credentials" / f"keyholder.{name}", as_keyholder / f"planner.{name}")
    shutil.copy(made / "credentials" / "ca.crt", as_keyholder)
    nobody = ssl.create_default_context(cafile=str(made / "credentials" / "ca.crt"))
    address = Address("127.0.0.1", running.port)
    for tls in (planner_side(tmp_path / "foreign"), planner_side(as_keyholder), nobody, None):
        with pytest.raises(KeyHolderUnreachableError, match="does not answer"):
            KeyHolderClient(address, tls).ask(AskPublicKeys(), PublishedKeys)
    assert running.client.ask(AskPublicKeys(), PublishedKeys).least_devices == 3, "it still answers the server"


def test_the_server_talks_to_no_other_host(made: Path, tmp_path: Path) -> None:
    provision(tmp_path, ["localhost"], [], keyholder_hosts=["elsewhere.example"])
    impostor = HolderProcess(made / "keys", tmp_path)
    impostor.start()
    try:
        with pytest.raises(KeyHolderUnreachableError, match="does not answer"):
            impostor.client.ask(AskPublicKeys(), PublishedKeys)
    finally:
        impostor.kill()


def test_silent_connections_do_not_shut_the_server_out(running: HolderProcess) -> None:
    silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(6)]
    try:
        assert running.client.ask(AskPublicKeys(), PublishedKeys).least_devices == 3
    finally:
        for connection in silent:
            connection.close()


def test_the_plan_crosses_the_wire_whole(running: HolderProcess, tables: EncryptedTables, made: Path) -> None:
    greedy = Greedy(clients_per_label=2, improve_up_to=0)
    plan = RemotePlanner(running.client, greedy).plan(tables, None)
    here = KeyDirectory(made / "keys").open().plan(tables, greedy)
    np.testing.assert_array_equal(plan.quotas, here.quotas)
    np.testing.assert_array_equal(plan.label_weights, here.label_weights)
    assert plan.shortfalls == here.shortfalls


def test_bad_tables_are_refused_with_the_reason(made: Path, tables: EncryptedTables) -> None:
    service = KeyService(KeyDirectory(made / "keys"), Address("127.0.0.1", 0), None)
    good = question(tables)
    other = EncryptedTables(tables.name, tables.devices, LABELS, (tables.totals,), tables.signs[0], tables.capacities)
    few = np.where(np.arange(len(tables.devices)) < 2, tables.capacities, 0)
    twice = np.where(np.arange(len(tables.devices)) < 4, 1, tables.devices)
    before = Greedy().plan(_fleet())
    bad: dict[str, AskPlan] = {
        "another key": question(replace(tables, name=b"none")),
        "unreadable ciphertext": question(other),
        "too few devices": question(replace(tables, capacities=few)),
        "tables of the wrong form": question(replace(tables, devices=twice)),
        "tables of the wrong size": question(replace(tables, signs=())),
        "malformed plan": msgspec.structs.replace(
            good, before=replace(before, quotas=np.zeros((1, 1), dtype=np.int64))
        ),
        "error": msgspec.structs.replace(good, quantities="lp"),
    }
    try:
        for reason, request in bad.items():
            reply = from_bytes(to_bytes(service.answer(to_bytes(request), "test")), KeyReply)
            assert isinstance(reply, Failed), reason
            assert reply.reason == reason
        assert isinstance(service.answer(b"no message", "test"), Failed)
        assert isinstance(service.answer(to_bytes(good), "test"), Planned)
    finally:
        service.close()


def _fleet() -> Fleet:
    return Fleet.numbered([3, 3], np.ones((2, LABELS)))


def test_a_lost_key_is_one_sentence(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "keys", tmp_path / "keys")
    (tmp_path / "keys" / "summing.key").unlink()
    command = fedkeep("keyholder", "serve", str(tmp_path / "keys"), "--insecure", "--listen", "127.0.0.1:0")
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("fedkeep: lost key: ")
    assert "create new keys and ask all devices for new profiles" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_keys_are_never_overwritten_and_missing_ones_are_named(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty"):
        KeyDirectory(made / "keys").create(COARSE)
    with pytest.raises(ConfigError, match="keyholder create"):
        KeyDirectory(tmp_path / "none").open()
    with pytest.raises(ConfigError, match="loopback only"):
        KeyService(KeyDirectory(made / "keys"), Address("0.0.0.0", 0), None)
    with pytest.raises(ConfigError, match="provision"):
        planner_side(tmp_path)


def test_plans_for_others_or_for_more_than_they_hold_are_not_followed(tables: EncryptedTables) -> None:
    class Lying(KeyHolderClient):
        def ask(self, request: Any, expected: Any) -> Any:
            return Planned(lie)

    planner = RemotePlanner(Lying(Address("127.0.0.1", 1), None), Greedy())
    good = Greedy().plan(_fleet())
    four = np.arange(4)
    for plan in (
        replace(good, devices=np.array([7, 8])),
        replace(good, devices=four, quotas=np.full((4, LABELS), 9)),
        replace(good, devices=four, quotas=np.zeros((4, LABELS + 1)), label_weights=np.ones(LABELS + 1)),
    ):
        lie = plan
        with pytest.raises(RefusedError, match="malformed plan"):
            planner.plan(tables, None)


@pytest.mark.parametrize("text", ["", "host", "host:", ":9600", "host:nine", "host:70000"])
def test_addresses_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Address.parse(text)


def test_addresses_of_version_six() -> None:
    assert Address.parse("[::1]:9600") == Address("::1", 9600)
    assert str(Address("::1", 9600)) == "[::1]:9600"
    assert Address("::1", 1).is_loopback


def test_what_is_no_reply_is_refused() -> None:
    with pytest.raises(RefusedError, match="malformed"):
        from_bytes(to_bytes(AskPublicKeys()), KeyReply)
