"""Agents that stream, SuperNodes with keys, a SuperLink with TLS: fifteen rounds, and devices killed on the way."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest

from fedkeep.flower.local_fleet import LocalFleet
from tests.flower.real_fleet import APP, agent_answers, saved_round, start_agent, wait_until

pytest.importorskip("fedkeep.link.client", reason="needs the agent")
pytestmark = pytest.mark.real

NODES = 4
ROUNDS = int(os.environ.get("FEDKEEP_ROUNDS", "15"))
KILLS = int(os.environ.get("FEDKEEP_DEVICE_KILLS", "2"))
DEADLINE = 25.0


def settings(state: Path) -> dict[str, str | int | float | bool]:
    return {
        "task.devices": NODES,
        "train.rounds": ROUNDS,
        "train.participation": 1.0,
        "rounds.min-devices": NODES,
        "rounds.deadline": DEADLINE,
        "rounds.quorum": 0.5,
        "state.url": str(state),
    }


def kill_device(fleet: LocalFleet, number: int, socket: Path) -> None:
    """kill -9 of a device, SuperNode and agent, in the middle of a round; the agent comes back with all it had."""
    from fedkeep.link.client import AgentClient

    with AgentClient(str(socket), timeout=30) as agent:
        before = agent.status()
    fleet.kill(f"node-{number}")
    fleet.kill(f"agent-{number}")
    start_agent(fleet, number, NODES)
    wait_until(partial(agent_answers, socket), 60, "the agent's return")
    with AgentClient(str(socket), timeout=30) as agent:
        after = agent.status()
    assert after.samples >= before.samples - 1
    assert after.counters["kept"] >= before.counters["kept"]
    fleet.start_node(number)


def test_devices_are_killed_mid_round_and_come_back_as_themselves(tmp_path: Path) -> None:
    state = tmp_path / "state.db"
    with LocalFleet.private(tmp_path / "fleet", NODES) as fleet:
        fleet.start_superlink()
        fleet.register()
        sockets = [start_agent(fleet, number, NODES) for number in range(NODES)]
        for number, socket in enumerate(sockets):
            wait_until(partial(agent_answers, socket), 60, f"the agent of device {number}")
            fleet.start_node(number, {"device": number, "agent-socket": str(socket)})
        run = fleet.submit(APP, settings(state))

        def saved(round_: int) -> bool:
            fleet.revive_nodes()
            return saved_round(state) >= round_

        for kill in range(KILLS):
            wait_until(partial(saved, 2 + kill), 300, f"round {2 + kill}")
            kill_device(fleet, kill % 2, sockets[kill % 2])
        wait_until(partial(saved, ROUNDS), 60 + 30 * ROUNDS, "the last round")
        wait_until(lambda: saved(0) and all(len(identities(fleet, n)) > 1 for n in range(min(KILLS, 2))), 120, "return")
        assert all(len(set(identities(fleet, number))) == 1 for number in range(NODES))
        wait_until(lambda: fleet.status(run).startswith("finished"), 60, "the end of the run")
        said = fleet.call(fleet.deployment.log(run), may_fail=True)
    seconds = [float(found) for found in re.findall(r"'seconds': ([0-9.]+)", said)]
    accuracy = float(re.findall(r"accuracy ([0-9.]+)", said)[-1])
    print(f"{ROUNDS} rounds, {sum(seconds):.0f} s in all, longest {max(seconds):.1f} s, accuracy {accuracy:.3f}")
    assert len(seconds) == ROUNDS
    assert max(seconds) < DEADLINE + 20
    assert accuracy > 0.2


def identities(fleet: LocalFleet, number: int) -> list[str]:
    """The node ids under which a SuperNode was let in, once per start."""
    return re.findall(r"SuperNode ID: (\d+)", fleet.log(f"node-{number}"))
