"""Real agents, called by a server in this process: what a fleet learns with another store."""

import time
from functools import partial
from pathlib import Path

from fedkeep.deploy.deployment import Deployment
from fedkeep.deploy.local_fleet import LocalFleet
from fedkeep.flower.client_app import app
from fedkeep.flower.server_app import open_fleet
from tests.flower.in_process import InProcessGrid, make_node
from tests.flower.real_fleet import agent_answers, app_accuracy, app_config, start_agent, wait_until

PAUSE = 0.3
"""Seconds between two rounds, in which the streams go on."""


def accuracy_with(
    policy: str, directory: Path, *, devices: int, rounds: int, arrivals: float
) -> float:
    """The accuracy after `rounds` of agents with this policy and `arrivals` samples a round each.

    Agents, streams, strategy and messages are those of a deployment. Only Flower's processes are
    missing, which change nothing but the time it takes (`test_real_resume.py`).
    """
    config = app_config(task__devices=devices, train__rounds=rounds, policy__name=policy)
    with LocalFleet(Deployment(directory, insecure=True)) as fleet:
        sockets = [
            start_agent(fleet, number, devices, policy, arrivals / PAUSE)
            for number in range(devices)
        ]
        for number, socket in enumerate(sockets):
            wait_until(partial(agent_answers, socket), 240, f"the agent of device {number}")
        nodes = [make_node(number, app, config) for number in range(devices)]
        for node, socket in zip(nodes, sockets, strict=True):
            node.context.node_config["agent-socket"] = str(socket)
        grid = InProcessGrid(nodes)
        strategy = open_fleet(config)
        for _ in strategy.rounds(grid, rounds):
            time.sleep(PAUSE)
    return app_accuracy(strategy.server.model, config)
