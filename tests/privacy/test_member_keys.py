"""Invented devices cannot pose as members of a secure sum, and its inputs are bounded."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedkeep.core.aggregation import UpdateSum
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.estimators import GivenEstimator
from fedkeep.core.planning.greedy import Uncoordinated
from fedkeep.core.schedule import Schedule
from fedkeep.core.server import Server
from fedkeep.core.types import LocalTraining, Report, TrainOrder, Vector
from fedkeep.deploy.credentials import provision
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.secagg.client import SecureAggregationClient
from fedkeep.privacy.secagg.fixed_point import WORD, FixedPoint
from fedkeep.privacy.secagg.protocol import (
    Keys,
    MaskingDevice,
    PartyKeys,
    SecureAggregationConfig,
    decode,
    encode,
)

MODEL: Vector = np.zeros(4, dtype=np.float32)
SESSION = b"s" * 16
ORDER = TrainOrder(0, MODEL, None, LocalTraining(0.1, 1))


def terms(device: int, count: int = 3, update_norm: float = 1.0) -> SecureAggregationConfig:
    return SecureAggregationConfig(
        SESSION, device, count, count, update_norm, 1.0, 0, 1.0, 1.0, 0.0
    )


def report(update: float) -> Report:
    return Report(0, np.full_like(MODEL, update), 1.0, 1, 1, None)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[SecureAggregationClient]:
    root = tmp_path_factory.mktemp("fleet")
    made = provision(root, ["localhost"], ["a", "b", "c"])
    nodes = str(root / "nodes")
    options = [
        PrivacyOptions(secure_aggregation=True, members=nodes, member_key=str(made.node_key(n)))
        for n in "abc"
    ]
    return [SecureAggregationClient(o, 0) for o in options]


def keys_of(member: SecureAggregationClient, device: int) -> Keys:
    return decode(member.hold(report(0.1), ORDER, terms(device)), Keys)


def test_registered_members_share_with_each_other(members: list[SecureAggregationClient]) -> None:
    roster = {d: keys_of(m, d).keys for d, m in enumerate(members)}
    assert members[0].answer(encode(PartyKeys(SESSION, roster)))


def test_a_device_the_server_invented_gets_no_share(members: list[SecureAggregationClient]) -> None:
    invented = SecureAggregationClient(PrivacyOptions(secure_aggregation=True), 0)
    roster = {
        0: keys_of(members[0], 0).keys,
        1: keys_of(invented, 1).keys,
        2: keys_of(invented, 2).keys,
    }
    with pytest.raises(RejectedError, match="not a member"):
        members[0].answer(encode(PartyKeys(SESSION, roster)))


def test_a_member_cannot_stand_for_another_or_twice(members: list[SecureAggregationClient]) -> None:
    roster = {d: keys_of(m, d).keys for d, m in enumerate(members)}
    with pytest.raises(RejectedError, match="two numbers"):
        members[0].answer(encode(PartyKeys(SESSION, {**roster, 3: keys_of(members[2], 3).keys})))
    with pytest.raises(RejectedError, match="not a member"):
        members[0].answer(
            encode(PartyKeys(SESSION, {**roster, 2: replace(roster[2], masking=roster[1].masking)}))
        )
    with pytest.raises(RejectedError, match="not a member"):
        members[0].answer(encode(PartyKeys(SESSION, {0: roster[0], 2: roster[1], 1: roster[2]})))


def test_registered_members_are_in_no_sum_of_two(members: list[SecureAggregationClient]) -> None:
    with pytest.raises(RejectedError, match="too few devices"):
        members[0].terms(encode(terms(0, count=2)))
    roster = {d: keys_of(m, d).keys for d, m in enumerate(members)}
    del roster[2]
    with pytest.raises(RejectedError, match="too few devices"):
        members[0].answer(encode(PartyKeys(SESSION, roster)))


def test_options_that_lack_a_half_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="belong together"):
        PrivacyOptions(members="somewhere")
    lost = PrivacyOptions(members=str(tmp_path), member_key=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="cannot be read"):
        SecureAggregationClient(lost, 0)


def test_a_key_of_another_kind_among_the_members_is_named(tmp_path: Path) -> None:
    made = provision(tmp_path, ["localhost"], ["a"])
    public = Ed25519PrivateKey.generate().public_key()
    encoded = public.public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    (tmp_path / "nodes" / "b.pub").write_bytes(encoded)
    options = PrivacyOptions(members=str(tmp_path / "nodes"), member_key=str(made.node_key("a")))
    with pytest.raises(ConfigError, match="no elliptic-curve key"):
        SecureAggregationClient(options, 0)


def test_an_update_longer_than_the_limit_is_cut_before_it_is_masked() -> None:
    member = SecureAggregationClient(PrivacyOptions(secure_aggregation=True), 0)
    member.hold(report(2.0), ORDER, terms(0))
    held = msgspec.msgpack.decode(member.snapshot()["held"].tobytes(), type=MaskingDevice)
    numbers = FixedPoint(1.0, 3).decode(np.frombuffer(held.words, WORD))
    assert np.linalg.norm(numbers[:4]) == pytest.approx(0.999, rel=1e-3)


def test_a_mean_longer_than_sums_have_been_does_not_count() -> None:
    server = Server(
        model=MODEL, gradient_size=4, regions=1, schedule=Schedule(0.1, 1),
        coordinator=Uncoordinated(), estimator=GivenEstimator(),
    )  # fmt: skip
    for _ in range(6):
        server.open_round([0, 1, 2])
        server.close_sum([0, 1, 2], UpdateSum(np.array([0.3, 0, 0, 0]), 3.0), None)
    before = server.model.copy()
    server.open_round([0, 1, 2])
    with pytest.raises(RejectedError, match="would be usual"):
        server.close_sum([0, 1, 2], UpdateSum(np.array([2700.0, 0, 0, 0]), 3.0), None)
    np.testing.assert_array_equal(server.model, before)
    assert server.max_summand_norm() == pytest.approx(3.0)
