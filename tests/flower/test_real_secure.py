"""Secure sums over a real SuperLink with TLS and node keys: agents, a plain device, a dropout."""

import re
from functools import partial
from pathlib import Path

import pytest

from fedkeep.deploy.deployment import CONNECTION
from tests.flower.real_fleet import (
    APP,
    RealFleet,
    agent_answers,
    saved_round,
    start_agent,
    wait_until,
)

pytestmark = pytest.mark.real

NODES, ROUNDS = 3, 2
SECURE = "[privacy]\nsecure_sum = true\n"


def test_devices_of_both_kinds_are_summed_and_one_that_drops_out_is_left_out(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state.db"
    settings: dict[str, str | int | float | bool] = {
        "task.devices": NODES,
        "storage.capacity": 5,
        "train.rounds": ROUNDS,
        "train.participation": 1.0,
        "rounds.min-devices": NODES,
        "rounds.deadline": 300.0,
        "privacy.secure-aggregation": True,
        "state.url": str(state),
    }
    with RealFleet.private(tmp_path / "fleet", NODES) as fleet:
        fleet.start_superlink()
        fleet.register()
        for number in (0, 1):
            socket = start_agent(fleet, number, NODES, extra=SECURE)
            wait_until(partial(agent_answers, socket), 240, f"the agent of device {number}")
            fleet.start_node(number, {"device": number, "agent-socket": str(socket)})
        fleet.start_node(2, {"device": 2, "state-dir": str(tmp_path / "devices")})
        run = fleet.submit(APP, settings)
        wait_until(lambda: saved_round(state) >= ROUNDS - 1, 600, "the round with all devices")
        fleet.kill("agent-1")
        wait_until(lambda: saved_round(state) >= ROUNDS, 600, "the last round")
        wait_until(lambda: fleet.status(run).startswith("finished"), 120, "the end of the run")
        said = fleet.call(["flwr", "log", run, CONNECTION, "--stream"], may_fail=True)
    rounds = re.findall(
        r"'accepted': (\d+).*?'rejected': (\[.*?\]).*?'quorate': (\d).*?'seconds': ([0-9.]+)", said
    )
    assert [accepted for accepted, *_ in rounds] == ["3", "2"]
    assert [refused for _, refused, *_ in rounds] == ["[]", "[1]"]
    assert all(quorate == "1" for _, _, quorate, _ in rounds)
    assert "no agent answers" in said
