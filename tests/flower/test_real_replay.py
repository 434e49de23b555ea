"""A reply sent again over a real SuperLink, and another to an answered message: neither counts."""

from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app.user_config import UserConfig

from fedkeep.core.types import Profile
from fedkeep.flower import codec
from fedkeep.protocol.messages import Profiled
from tests.flower.real_fleet import APP, RealFleet, wait_until
from tests.flower.wire_node import wire_node

pytestmark = pytest.mark.real

SETTINGS: UserConfig = {
    "task.devices": 1,
    "train.rounds": 2,
    "rounds.min-devices": 1,
    "rounds.deadline": 20.0,
}


def profile(capacity: int) -> Profile:
    return Profile(capacity, np.full(10, 2.0))


def test_a_reply_counts_once_however_often_it_is_sent(tmp_path: Path) -> None:
    with RealFleet.private(tmp_path / "fleet", nodes=1) as fleet:
        fleet.start_superlink()
        fleet.register()
        key = load_ssh_private_key(
            fleet.deployment.credentials.node_key("node-0").read_bytes(), None
        )
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        with wire_node(fleet, key) as node:
            fleet.start("run", [*fleet.deployment.run(APP, SETTINGS), "--stream"])
            question = node.asked()
            assert question.metadata.message_type == "query.profile"
            first = node.reply(question, codec.encode(Profiled(profile(7), 0)))
            assert node.send(first) > 0
            assert node.send(first) == 0, "the same reply again: the SuperLink has it"
            second = node.reply(question, codec.encode(Profiled(profile(99), 0)))
            assert node.send(second) == 0, (
                "another reply to the same message: the SuperLink wants none of it"
            )
            order = node.asked()
            assert order.metadata.message_type == "train"
        wait_until(
            lambda: "Failed to store Message reply" in fleet.log("superlink"),
            10,
            "the SuperLink's word on it",
        )
