"""Agents that stream, SuperNodes with keys, a SuperLink with TLS: fifteen rounds, and devices killed on the way."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fedkeep.flower.local_fleet import LocalFleet
from tests.flower.real_fleet import APP, agent_answers, saved_round, start_agent, wait_until

pytest.importorskip("fedkeep.link.client", reason="needs the agent")

NODES = 4
ROUNDS = int(os.environ.get("FEDKEEP_ROUNDS", "15"))
KILLS = int(os.environ.get("FEDKEEP_DEVICE_KILLS", "2"))
DEADLINE = 25.0


def test_devices_are_killed_mid_round_and_come_back_with_all_they_had(tmp_path: Path) -> None:
    from fedkeep.link.client import AgentClient

    state = tmp_path / "state.db"
    settings = {
        "task.devices": NODES,
        "train.rounds": ROUNDS,
        "train.participation": 1.0,
        "rounds.min-devices": NODES,
        "rounds.deadline": DEADLINE,
        "rounds.quorum": 0.5,
        "state.url": str(state),
    }
    with LocalFleet.private(tmp_path / "fleet", NODES) as fleet:
        fleet.start_superlink()
        fleet.register()
        sockets = [start_agent(fleet, number, NODES) for number in range(NODES)]
        for number, socket in enumerate(sockets):
            wait_until(lambda socket=socket: agent_answers(socket), 60, f"the agent of device {number}")
            fleet.start_node(number, {"device": number, "agent-socket": str(socket)})
        run = fleet.submit(APP, settings)
        for kill in range(KILLS):
            wait_until(lambda kill=kill: saved_round(state) >= 3 * kill + 2, 240, f"round {3 * kill + 2}")
            victim = kill % NODES
            with AgentClient(str(sockets[victim]), timeout=30) as agent:
                before = agent.status()
            fleet.kill(f"node-{victim}")
            fleet.kill(f"agent-{victim}")
            start_agent(fleet, victim, NODES)
            wait_until(lambda victim=victim: agent_answers(sockets[victim]), 60, "the agent's return")
            with AgentClient(str(sockets[victim]), timeout=30) as agent:
                after = agent.status()
            assert after.samples >= min(before.samples, before.capacity) - 1
            assert after.counters["kept"] >= before.counters["kept"]
            fleet.start_node(victim)
        wait_until(lambda: saved_round(state) >= ROUNDS, 60 + 15 * ROUNDS, "the last round")
        wait_until(lambda: fleet.status(run).startswith("finished"), 60, "the end of the run")
        said = fleet.call(fleet.deployment.log(run), may_fail=True)
    print(said)
    seconds = [float(found) for found in re.findall(r"'seconds': ([0-9.]+)", said)]
    assert len(seconds) == ROUNDS
    assert max(seconds) < DEADLINE + 15
    accuracy = float(re.findall(r"accuracy ([0-9.]+)", said)[-1])
    assert accuracy > 0.2
