"""Agents that stream, SuperNodes with keys, a SuperLink with TLS: fifteen rounds, and devices killed on the way."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from fedkeep.flower.local_fleet import LocalFleet
from tests.flower.agent_rounds import accuracy_with
from tests.flower.real_fleet import APP, agent_answers, saved_round, start_agent, wait_until

pytest.importorskip("fedkeep.link.client", reason="needs the agent")
pytestmark = pytest.mark.real

NODES, RATE = 4, 20.0
ROUNDS = int(os.environ.get("FEDKEEP_ROUNDS", "15"))
KILLS = int(os.environ.get("FEDKEEP_DEVICE_KILLS", "2"))
FOUND = os.environ.get("FEDKEEP_FOUND")
"""A file that takes the figures, for the table of the long form."""
DEADLINE = 40.0


def settings(state: Path) -> dict[str, str | int | float | bool]:
    """All are asked and the first half is waited for, so that two dead devices hold up no round."""
    return {
        "task.devices": NODES,
        "train.rounds": ROUNDS,
        "rounds.min-devices": NODES,
        "rounds.over-selection": 2.0,
        "rounds.deadline": DEADLINE,
        "state.url": str(state),
    }


def kill_device(fleet: LocalFleet, number: int, socket: Path) -> None:
    """kill -9 of a device, SuperNode and agent, in the middle of a round; the agent comes back with all it had."""
    from fedkeep.link.client import AgentClient

    with AgentClient(str(socket), timeout=30) as agent:
        before = agent.status()
    fleet.kill(f"node-{number}")
    fleet.kill(f"agent-{number}")
    start_agent(fleet, number, NODES, rate=RATE)
    wait_until(partial(agent_answers, socket), 60, "the agent's return")
    with AgentClient(str(socket), timeout=30) as agent:
        after = agent.status()
    assert after.samples >= before.samples - 1
    assert after.counters["kept"] >= before.counters["kept"]
    fleet.start_node(number)


def test_devices_are_killed_mid_round_and_come_back_as_themselves(tmp_path: Path) -> None:
    state, began = tmp_path / "state.db", time.monotonic()
    with LocalFleet.private(tmp_path / "fleet", NODES) as fleet:
        sockets = [start_agent(fleet, number, NODES, rate=RATE) for number in range(NODES)]
        fleet.start_superlink()
        fleet.register()
        for number, socket in enumerate(sockets):
            wait_until(partial(agent_answers, socket), 60, f"the agent of device {number}")
            fleet.start_node(number, {"device": number, "agent-socket": str(socket)})
        fleet.start("run", [*fleet.deployment.run(APP, settings(state)), "--stream"])

        def saved(round_: int) -> bool:
            fleet.revive_nodes()
            return saved_round(state) >= round_

        killed: Counter[int] = Counter()

        def away() -> set[int]:
            """Devices that were killed and have not been let in again."""
            fleet.revive_nodes()
            return {number for number in range(NODES) if len(identities(fleet, number)) <= killed[number]}

        def may_be_killed(number: int) -> bool:
            return len(away() | {number}) <= 2 and number not in away()

        for kill in range(KILLS):
            number = kill % NODES
            wait_until(partial(saved, 2 + kill), 300, f"round {2 + kill}")
            wait_until(partial(may_be_killed, number), 300, f"device {number} and one more in the fleet")
            assert saved_round(state) < ROUNDS, "it is killed while rounds are played"
            kill_device(fleet, number, sockets[number])
            killed[number] += 1
        wait_until(lambda: not away(), 180, "the return of the killed")
        wait_until(partial(saved, ROUNDS), 60 + 30 * ROUNDS, "the last round")
        assert all(len(set(identities(fleet, number))) == 1 for number in range(NODES))
        wait_until(lambda: "done:" in fleet.log("run"), 60, "the end of the run")
        said = fleet.log("run")
    seconds = [float(found) for found in re.findall(r"'seconds': ([0-9.]+)", said)]
    assert len(seconds) == ROUNDS
    assert max(seconds) < DEADLINE + 20
    learned = float(re.findall(r"accuracy ([0-9.]+)", said)[-1])
    again = partial(accuracy_with, devices=NODES, rounds=ROUNDS, arrivals=RATE * sum(seconds) / ROUNDS)
    ode, random = again("ode", tmp_path / "ode"), again("reservoir", tmp_path / "random")
    print(f"{ROUNDS} rounds, {sum(seconds):.0f} s in all, longest {max(seconds):.1f} s, {KILLS} devices killed")
    print(f"accuracy {learned:.3f} over the SuperLink; in one process {ode:.3f}, with a random store {random:.3f}")
    print(f"all in {time.monotonic() - began:.0f} s")
    if FOUND:
        figures = {"rounds": ROUNDS, "kills": KILLS, "longest": max(seconds), "deadline": DEADLINE}
        Path(FOUND).write_text(json.dumps(figures | {"accuracy": learned, "random": random}))
    assert learned > ode - 0.15, "killed devices and late replies cost little"
    assert ode > random - 0.05, "what ODE keeps teaches no less than a random store"


def identities(fleet: LocalFleet, number: int) -> list[str]:
    """The node ids under which a SuperNode was let in, once per start."""
    return re.findall(r"SuperNode ID: (\d+)", fleet.log(f"node-{number}"))
